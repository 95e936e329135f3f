/* A thread sleeps in a call on a connection, and another thread closes the connection as Java does: it puts a dead socket
 * in place of the fd by dup2, then sends the thread a signal. The call ends with EINTR, or begins on the dead socket.
 *
 *     closing ROUNDS
 *
 * Each round has a new connection, which is closed at another moment of its promotion and of the call.
 */
#include "common.h"

enum way { RECV, RECV_RESTARTED, POLL, SELECT, EPOLL, SEND, WAYS };

struct sleeper {
    enum way way;
    int fd, set;
    atomic_int is_there;
};

static void nothing(int signal)
{
    (void)signal;
}

/* Whether a call has ended in a way that the kernel's may. */
static int is_ended(enum way way, ssize_t n)
{
    switch (way) {
    case RECV:
        return n == 0 || (n < 0 && errno == EINTR);
    case RECV_RESTARTED:
        return n == 0;
    case SEND:
        return n >= 0 || errno == EINTR || errno == EPIPE || errno == ECONNRESET;
    case EPOLL:
        return n < 0 && (errno == EINTR || errno == EINVAL);
    default:
        return n == 1 || (n < 0 && errno == EINTR);
    }
}

static void *sleep_on(void *argument)
{
    static char much[8 << 20];
    struct sleeper *sleeper = argument;
    struct pollfd entry = {.fd = sleeper->fd, .events = POLLIN};
    struct epoll_event event;
    fd_set set;
    char byte;
    ssize_t n;
    FD_ZERO(&set);
    FD_SET(sleeper->fd, &set);
    sleeper->is_there = 1;
    switch (sleeper->way) {
    case POLL:
        n = poll(&entry, 1, -1);
        break;
    case SELECT:
        n = select(sleeper->fd + 1, &set, NULL, NULL, NULL);
        break;
    case EPOLL:
        n = epoll_wait(sleeper->set, &event, 1, -1);
        break;
    case SEND:
        n = send(sleeper->fd, much, sizeof much, MSG_NOSIGNAL);
        break;
    default:
        n = recv(sleeper->fd, &byte, 1, 0);
    }
    if (!is_ended(sleeper->way, n)) {
        dprintf(2, "way %d gives %zd, errno %d\n", sleeper->way, n, errno);
        _exit(1);
    }
    return NULL;
}

/* A socket at its end, in both directions. */
static int dead_socket(void)
{
    int pair[2];
    MUST(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair));
    MUST(shutdown(pair[0], SHUT_RDWR));
    close(pair[1]);
    return pair[0];
}

int main(int argc, char **argv)
{
    int rounds = argc > 1 ? atoi(argv[1]) : 1;
    struct sockaddr_in at;
    struct sigaction action = {.sa_handler = nothing};
    echo_process(&at);
    int dead = dead_socket();
    MUST(sigaction(SIGUSR1, &action, NULL));
    action.sa_flags = SA_RESTART;
    MUST(sigaction(SIGUSR2, &action, NULL));
    for (int round = 0; round < rounds; round++) {
        struct sleeper sleeper = {.way = round % WAYS, .fd = connected(&at), .set = MUST(epoll_create1(EPOLL_CLOEXEC))};
        int closed = sleeper.way == EPOLL ? sleeper.set : sleeper.fd;
        struct epoll_event event = {.events = EPOLLIN};
        char byte = 0;
        pthread_t thread;
        MUST(epoll_ctl(sleeper.set, EPOLL_CTL_ADD, sleeper.fd, &event));
        /* Some are closed while they are promoted, most after that. */
        for (int turn = 0; turn < round / WAYS % 12; turn++) {
            CHECK(put_all(sleeper.fd, &byte, 1) == 1 && get_all(sleeper.fd, &byte, 1) == 1);
            pause_us(turn % 4 == 3 ? 1000 : 100);
        }
        CHECK(pthread_create(&thread, NULL, sleep_on, &sleeper) == 0);
        while (!sleeper.is_there)
            ;
        /* The thread is on its way into its sleep, or spins, or sleeps. */
        for (double until = seconds() + round * 7 % 100 * 1e-6; seconds() < until;)
            ;
        if (round % 5 == 0)
            pause_us(500);
        /* The other end follows, which wakes the thread. */
        if (round % 2 == 0 && sleeper.way != EPOLL)
            MUST(shutdown(sleeper.fd, SHUT_WR));
        MUST(dup2(dead, closed));
        CHECK(pthread_kill(thread, sleeper.way == RECV_RESTARTED ? SIGUSR2 : SIGUSR1) == 0);
        struct timespec late;
        clock_gettime(CLOCK_REALTIME, &late);
        late.tv_sec += 10;
        if (pthread_timedjoin_np(thread, NULL, &late) != 0) {
            dprintf(2, "round %d: a thread sleeps on, in way %d\n", round, sleeper.way);
            _exit(1);
        }
        close(sleeper.fd);
        close(sleeper.set);
    }
    printf("every call has ended\n");
    return 0;
}
