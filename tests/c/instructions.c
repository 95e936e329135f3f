/* Both ends of a connection in one thread, which moves 8 bytes ROUNDS times by one kind of call. Without the library, or
 * by way of `pipe`, the calls pass through to libc. Run under callgrind, two numbers of rounds give the instructions of
 * one round.
 *
 *     instructions link|pipe send|write|writev|epoll|poll ROUNDS
 */
#include "common.h"

#include "../../include/rdmasock.h"

enum { BYTES = 8 };

/* What moves a message. */
static const char *const KINDS[] = {"send", "write", "writev", "epoll", "poll"};
enum kind { SEND, WRITE, WRITEV, EPOLL, POLL, NONE };

/* Moves a message; waits for it by `set` or by poll() if the kind says so. */
static inline void move(enum kind kind, int from, int to, int set)
{
    char bytes[BYTES] = {0};
    struct iovec parts[2] = {{bytes, BYTES / 2}, {bytes + BYTES / 2, BYTES / 2}};
    struct epoll_event event;
    struct pollfd asked = {.fd = to, .events = POLLIN};
    if (kind == WRITE) {
        CHECK(write(from, bytes, BYTES) == BYTES);
        CHECK(read(to, bytes, BYTES) == BYTES);
    } else if (kind == WRITEV) {
        CHECK(writev(from, parts, 2) == BYTES);
        CHECK(readv(to, parts, 2) == BYTES);
    } else {
        CHECK(send(from, bytes, BYTES, 0) == BYTES);
        if (kind == EPOLL)
            CHECK(epoll_wait(set, &event, 1, -1) == 1);
        else if (kind == POLL)
            CHECK(poll(&asked, 1, -1) == 1);
        CHECK(recv(to, bytes, BYTES, 0) == BYTES);
    }
}

/* Whether both directions of the end are on shared memory. */
static int is_on_link(int fd)
{
    struct rdmasock_info info = {.size = sizeof info};
    return rdmasock_info(fd, &info) == 0 && info.sends_by == RDMASOCK_SHM && info.receives_by == RDMASOCK_SHM;
}

int main(int argc, char **argv)
{
    CHECK(argc == 4);
    enum kind kind = SEND;
    while (kind < NONE && strcmp(argv[2], KINDS[kind]) != 0)
        kind++;
    CHECK(kind < NONE);
    int ends[2], set = MUST(epoll_create1(0));
    if (strcmp(argv[1], "pipe") == 0) {
        MUST(pipe(ends));
    } else {
        struct sockaddr_in at;
        int listener = listening(&at);
        double until = seconds() + 60;
        ends[1] = connected(&at);
        ends[0] = MUST(accept(listener, NULL, NULL));
        MUST(epoll_ctl(set, EPOLL_CTL_ADD, ends[0], &(struct epoll_event){.events = EPOLLIN}));
        while (!is_on_link(ends[0]) || !is_on_link(ends[1])) {
            CHECK(seconds() < until);
            move(SEND, ends[1], ends[0], set);
            move(SEND, ends[0], ends[1], set);
            pause_us(2000);
        }
    }
    for (long left = atol(argv[3]); left > 0; left--)
        move(kind, ends[1], ends[0], set);
    return 0;
}
