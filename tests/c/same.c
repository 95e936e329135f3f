/* A handler that uses the very connection that its thread is at, in the middle of whatever call: it sends on it, asks whether it can be
 * written to, and peeks, and none of it fails or is torn. All that both have sent comes back.
 *
 *     same ROUNDS
 */
#include "common.h"

enum { RECORD = 8 };

static int fd = -1;
static volatile long ran, wrong;

/* Once: as long as a handler may take, what it interrupts gets on. */
static void soon(long us)
{
    struct itimerval once = {{0, 0}, {0, us}};
    setitimer(ITIMER_REAL, &once, NULL);
}

static void on_timer(int signal)
{
    int kept = errno;
    struct pollfd p = {fd, POLLOUT, 0};
    char peeked[RECORD];
    (void)signal;
    if (send(fd, "handler\n", RECORD, MSG_NOSIGNAL) == RECORD)
        ran++;
    else
        wrong++;
    if (poll(&p, 1, 0) != 1 || p.revents != POLLOUT)
        wrong++;
    if (recv(fd, peeked, RECORD, MSG_PEEK | MSG_DONTWAIT) < 0 && errno != EAGAIN)
        wrong++;
    soon(200);
    errno = kept;
}

int main(int argc, char **argv)
{
    struct sockaddr_in at;
    int rounds = argc > 1 ? atoi(argv[1]) : 1000;
    long heard = 0;
    setvbuf(stdout, NULL, _IONBF, 0);
    pid_t pid = echo_process(&at);
    fd = connected(&at);
    struct sigaction action = {.sa_handler = on_timer, .sa_flags = SA_RESTART};
    MUST(sigaction(SIGALRM, &action, NULL));
    soon(200);
    for (int round = 0; round < rounds; round++) {
        char record[RECORD + 1], came[RECORD];
        snprintf(record, sizeof record, "%07d\n", round % 10000000);
        CHECK(send(fd, record, RECORD, MSG_NOSIGNAL) == RECORD);
        for (;;) {
            CHECK(get_all(fd, came, RECORD) == RECORD);
            if (memcmp(came, record, RECORD) == 0)
                break;
            CHECK(memcmp(came, "handler\n", RECORD) == 0);
            heard++;
        }
    }
    MUST(sigaction(SIGALRM, &(struct sigaction){.sa_handler = SIG_IGN}, NULL));
    while (heard < ran) {
        char came[RECORD];
        CHECK(get_all(fd, came, RECORD) == RECORD);
        CHECK(memcmp(came, "handler\n", RECORD) == 0);
        heard++;
    }
    CHECK(wrong == 0);
    CHECK(rounds < 1000 || ran > 10);
    kill(pid, SIGKILL);
    printf("all is whole\n");
    _exit(0);
}
