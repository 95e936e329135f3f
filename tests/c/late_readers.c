/* A server in a control group with little memory, and clients outside that read late: what the server may send ahead of
 * them is bounded by the group, and each gets all of it.
 * Usage: late_readers CLIENTS [the group's cgroup.procs] */
#include "common.h"

enum { BYTES = 6 << 20, MOST = 500, WARM = 8, PIECE = 4096 };

static int fds[MOST];
static char buffer[1 << 16];

static void enter(const char *group)
{
    char text[32];
    int fd = MUST(open(group, O_WRONLY | O_CLOEXEC));
    MUST(write(fd, text, snprintf(text, sizeof text, "%d", getpid())));
    close(fd);
}

static void serve(int listener, int count)
{
    static size_t sent[MOST];
    for (int i = 0; i < count; i++)
        fds[i] = MUST(accept(listener, NULL, NULL));
    for (int round = 0; round < WARM; round++)
        for (int i = 0; i < count; i++) {
            CHECK(recv(fds[i], buffer, PIECE, MSG_WAITALL) == PIECE);
            CHECK(send(fds[i], buffer, PIECE, MSG_NOSIGNAL) == PIECE);
        }
    for (int left = count; left > 0; pause_us(1000)) {
        left = 0;
        for (int i = 0; i < count; i++) {
            size_t want = BYTES - sent[i];
            ssize_t n = send(fds[i], buffer, want < sizeof buffer ? want : sizeof buffer, MSG_DONTWAIT | MSG_NOSIGNAL);
            CHECK(n >= 0 || errno == EAGAIN);
            sent[i] += n > 0 ? n : 0;
            left += sent[i] < BYTES;
        }
    }
    for (int i = 0; i < count; i++) {
        MUST(shutdown(fds[i], SHUT_WR));
        CHECK(recv(fds[i], buffer, 1, 0) == 0);
    }
}

int main(int argc, char **argv)
{
    int count = argc > 1 ? atoi(argv[1]) : 1, status;
    CHECK(count <= MOST);
    struct sockaddr_in at;
    int listener = listening(&at), child = MUST(fork());
    if (child == 0) {
        MUST(prctl(PR_SET_PDEATHSIG, SIGKILL));
        if (argc > 2)
            enter(argv[2]);
        serve(listener, count);
        _exit(0);
    }
    for (int i = 0; i < count; i++)
        fds[i] = connected(&at);
    for (int round = 0; round < WARM; round++) {
        for (int i = 0; i < count; i++)
            CHECK(send(fds[i], buffer, PIECE, 0) == PIECE);
        for (int i = 0; i < count; i++)
            CHECK(recv(fds[i], buffer, PIECE, MSG_WAITALL) == PIECE);
    }
    /* Until the server has sent all that it can. */
    pause_us(2000000);
    for (int i = 0; i < count; i++) {
        ssize_t n;
        size_t got = 0;
        while (got < BYTES && (n = recv(fds[i], buffer, sizeof buffer, 0)) > 0)
            got += n;
        CHECK(got == BYTES);
    }
    for (int i = 0; i < count; i++)
        close(fds[i]);
    MUST(waitpid(child, &status, 0));
    CHECK(status == 0);
    dprintf(1, "all got all\n");
    return 0;
}
