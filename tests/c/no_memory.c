/* Programs that cope with malloc's NULL: two processes that get no more memory (RLIMIT_AS or RLIMIT_DATA), from the first
 * connection on or later, and go on to connect, accept, watch, send and receive.
 * Usage: no_memory CONNECTIONS [as|data [late]] */
#include "common.h"
#include <sys/resource.h>

enum { ROUNDS = 8, MOST = 4000, BYTES = 3000 };

static int fds[MOST];
static char sent[BYTES], got[BYTES];

/* Takes what malloc has left, too. */
static void no_more_memory(const char *limit)
{
    char text[128] = "";
    unsigned long pages[6] = {0};
    int fd = MUST(open("/proc/self/statm", O_RDONLY | O_CLOEXEC));
    MUST(read(fd, text, sizeof text - 1));
    close(fd);
    CHECK(sscanf(text, "%lu %lu %lu %lu %lu %lu", &pages[0], &pages[1], &pages[2], &pages[3], &pages[4], &pages[5]) == 6);
    int is_as = strcmp(limit, "as") == 0;
    unsigned long bytes = pages[is_as ? 0 : 5] * 4096;
    struct rlimit to = {bytes, bytes};
    MUST(setrlimit(is_as ? RLIMIT_AS : RLIMIT_DATA, &to));
    for (size_t size = 1 << 20; size >= 16; size /= 2)
        for (void *volatile block; (block = malloc(size)) != NULL;)
            ;
}

static void all(int fd, char *at, size_t len, int is_send)
{
    while (len > 0) {
        ssize_t n = is_send ? send(fd, at, len, MSG_NOSIGNAL) : recv(fd, at, len, 0);
        CHECK(n > 0);
        at += n;
        len -= n;
    }
}

static void round_trips(int count, int is_client, int epoll)
{
    for (int round = 0; round < ROUNDS; round++)
        for (int i = 0; i < count; i++) {
            memset(sent, 'a' + (i + round) % 26, BYTES);
            struct epoll_event event;
            if (is_client)
                all(fds[i], sent, BYTES, 1);
            if (!is_client) {
                CHECK(MUST(epoll_wait(epoll, &event, 1, -1)) == 1);
                CHECK(event.data.u32 == (uint32_t)i);
            }
            all(fds[i], got, BYTES, 0);
            CHECK(memcmp(sent, got, BYTES) == 0);
            if (!is_client)
                all(fds[i], sent, BYTES, 1);
        }
}

static void begin(int from, int to, int is_client, int listener, int epoll, const struct sockaddr_in *at)
{
    for (int i = from; i < to; i++) {
        fds[i] = is_client ? connected(at) : MUST(accept4(listener, NULL, NULL, SOCK_CLOEXEC));
        struct epoll_event event = {.events = EPOLLIN, .data.u32 = i};
        if (!is_client)
            MUST(epoll_ctl(epoll, EPOLL_CTL_ADD, fds[i], &event));
    }
}

int main(int argc, char **argv)
{
    int count = argc > 1 ? atoi(argv[1]) : 1, is_late = argc > 3, status;
    CHECK(count <= MOST);
    struct rlimit files;
    MUST(getrlimit(RLIMIT_NOFILE, &files));
    files.rlim_cur = files.rlim_max;
    MUST(setrlimit(RLIMIT_NOFILE, &files));
    struct sockaddr_in at;
    int listener = listening(&at);
    int child = MUST(fork()), is_client = child != 0;
    if (!is_client)
        MUST(prctl(PR_SET_PDEATHSIG, SIGKILL));
    int epoll = MUST(epoll_create1(EPOLL_CLOEXEC));
    int first = is_late ? count / 4 : 0;
    begin(0, first, is_client, listener, epoll, &at);
    round_trips(first, is_client, epoll);
    if (argc > 2)
        no_more_memory(argv[2]);
    begin(first, count, is_client, listener, epoll, &at);
    round_trips(count, is_client, epoll);
    for (int i = 0; i < count; i++)
        close(fds[i]);
    if (!is_client)
        _exit(0);
    MUST(waitpid(child, &status, 0));
    CHECK(status == 0);
    dprintf(1, "all came back\n");
    return 0;
}
