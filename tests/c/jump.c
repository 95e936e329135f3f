/* siglongjmp out of a handler that has interrupted a call: the classic time-out. A timer fires at any instruction of calls on
 * a connection, above whatever they do. Afterwards the connection works as ever: what comes is never out of order or
 * repeated, though what a call had when it was left is lost, as on kernel TCP.
 *
 *     jump ROUNDS [large]
 *
 * A round is one timed call; `large` has the lines come many at once, to large buffers. The handler runs on the thread's stack, then on an alternate one.
 */
#include "common.h"

static sigjmp_buf out;
static volatile sig_atomic_t armed;
static volatile long jumps;

static void on_timer(int signal)
{
    (void)signal;
    if (armed) {
        armed = 0;
        jumps++;
        siglongjmp(out, 1);
    }
}

/* After so many microseconds, once. */
static void timer_in(long us)
{
    struct itimerval timer = {{0, 0}, {0, us}};
    setitimer(ITIMER_REAL, &timer, NULL);
}

static unsigned seed = 1;

/* Most lines that are sent at once, and most bytes that are read. */
static int most_lines = 64, most_read = 4096;

/* Sends lines of eight bytes, numbered. */
static void *write_lines(void *arg)
{
    int fd = (intptr_t)arg;
    unsigned next = 0;
    for (unsigned round = 0;; round++) {
        static char buf[8192 * 8 + 1];
        int count = 1 + round * (most_lines / 64) % most_lines;
        for (int i = 0; i < count; i++)
            snprintf(buf + 8 * i, 9, "%07x\n", next++ & 0xfffffff);
        /* Now and then the reader has to wait. */
        if (round % 64 == 0 || most_lines > 64)
            pause_us(most_lines > 64 ? 100 : 1000);
        if (put_all(fd, buf, 8 * count) < 0)
            return NULL;
    }
}

/* What is read of them. */
static long last = -1;
static char part[16];
static int have;

/* A call was left, and may have had something: what follows is looked at from the next whole line on. */
static volatile int is_torn;

/* Each whole line has a higher number than the one before. */
static void check_lines(const char *buf, int len)
{
    static int follows;
    for (int at = 0; at < len; at++) {
        if (is_torn) {
            have = follows = 0;
            is_torn = buf[at] != '\n';
            continue;
        }
        CHECK(have < 8);
        part[have++] = buf[at];
        if (buf[at] != '\n')
            continue;
        part[have] = 0;
        CHECK(have == 8);
        long number = strtol(part, NULL, 16);
        CHECK(last < 0 || number > last);
        CHECK(last < 0 || !follows || number == last + 1);
        last = number;
        follows = 1;
        have = 0;
    }
}

static void read_timed(int fd, int rounds)
{
    static char buf[262144];
    volatile double heard = seconds();
    for (volatile int round = 0; round < rounds; round++) {
        volatile long n = -1;
        if (sigsetjmp(out, 1) == 0) {
            armed = 1;
            timer_in(1 + rand_r(&seed) % 300);
            switch (round % 5) {
            case 0:
                n = recv(fd, buf, 1 + rand_r(&seed) % most_read, 0);
                break;
            case 1:
                n = read(fd, buf, most_read);
                break;
            case 2: {
                struct pollfd p = {fd, POLLIN, 0};
                poll(&p, 1, -1);
                n = 0;
                break;
            }
            case 3: {
                fd_set set;
                FD_ZERO(&set);
                FD_SET(fd, &set);
                select(fd + 1, &set, NULL, NULL, NULL);
                n = 0;
                break;
            }
            default: {
                struct iovec v[2] = {{buf, most_read / 40}, {buf + most_read / 40, most_read / 5}};
                struct msghdr m = {.msg_iov = v, .msg_iovlen = 2};
                n = recvmsg(fd, &m, MSG_WAITALL);
            }
            }
            armed = 0;
            CHECK(n >= 0 || errno == EINTR);
            if (n > 0) {
                check_lines(buf, n);
                heard = seconds();
            }
        } else {
            is_torn = 1;
        }
        if (seconds() - heard > 20) {
            dprintf(2, "nothing comes any more\n");
            _exit(1);
        }
    }
    timer_in(0);
    /* The last word: it goes on. */
    long before = last;
    for (int i = 0; i < 200; i++) {
        long n = recv(fd, buf, most_read, 0);
        CHECK(n > 0);
        check_lines(buf, n);
    }
    CHECK(last > before);
}

/* Sends, timed; the other end drops it. */
static void write_timed(int fd, int rounds)
{
    static char buf[65536];
    for (volatile int round = 0; round < rounds; round++) {
        if (sigsetjmp(out, 1) == 0) {
            armed = 1;
            timer_in(1 + rand_r(&seed) % 300);
            long n = round & 1 ? send(fd, buf, sizeof buf, MSG_NOSIGNAL) : write(fd, buf, 200);
            armed = 0;
            CHECK(n > 0 || errno == EINTR);
        }
    }
    timer_in(0);
    CHECK(put_all(fd, buf, 4096) > 0);
}

/* One that sleeps is given up, in each call that may. */
static void wait_timed(int fd, int set, int rounds)
{
    static char buf[64];
    for (volatile int round = 0; round < rounds; round++) {
        volatile long before = jumps;
        if (sigsetjmp(out, 1) == 0) {
            struct epoll_event event;
            struct pollfd p = {fd, POLLIN, 0};
            armed = 1;
            timer_in(1 + rand_r(&seed) % 2000);
            switch (round % 3) {
            case 0:
                recv(fd, buf, sizeof buf, 0);
                break;
            case 1:
                poll(&p, 1, -1);
                break;
            default:
                epoll_wait(set, &event, 1, -1);
            }
            CHECK(0);
        }
        CHECK(jumps == before + 1);
    }
    timer_in(0);
}

static void ping(int fd, int rounds)
{
    char ask[64] = "ping", answer[64];
    for (int i = 0; i < rounds; i++) {
        ask[10] = i;
        CHECK(put_all(fd, ask, sizeof ask) > 0);
        CHECK(get_all(fd, answer, sizeof answer) > 0);
        CHECK(memcmp(ask, answer, sizeof ask) == 0);
    }
}

static void *drop_all(void *arg)
{
    static char buf[65536];
    while (recv((intptr_t)arg, buf, sizeof buf, 0) > 0)
        ;
    return NULL;
}

/* A process that writes lines to the first connection, drops what the second brings, and echoes the third. */
static void other_end(int listener)
{
    pthread_t thread;
    for (int i = 0; i < 3; i++) {
        static void *(*const what[])(void *) = {write_lines, drop_all, echo_one};
        intptr_t fd = accept(listener, NULL, NULL);
        char hello[20];
        /* Until it is worth moving. */
        for (int n = 0; n < 40; n++)
            if (get_all(fd, hello, sizeof hello) <= 0 || put_all(fd, hello, sizeof hello) < 0)
                _exit(1);
        pthread_create(&thread, NULL, what[i], (void *)fd);
    }
    pause();
}

static int warm(const struct sockaddr_in *to)
{
    char hello[20] = "hello";
    int fd = connected(to);
    for (int n = 0; n < 40; n++) {
        CHECK(put_all(fd, hello, sizeof hello) > 0);
        CHECK(get_all(fd, hello, sizeof hello) > 0);
    }
    return fd;
}

int main(int argc, char **argv)
{
    int rounds = argc > 1 ? atoi(argv[1]) : 1000;
    struct sockaddr_in at;
    static char other[65536];
    setvbuf(stdout, NULL, _IONBF, 0);
    if (argc > 2) {
        most_lines = 8192;
        most_read = 262144;
    }
    int listener = listening(&at);
    pid_t pid = MUST(fork());
    if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        other_end(listener);
    }
    close(listener);
    int lines = warm(&at), sink = warm(&at), echo = warm(&at);
    int set = MUST(epoll_create1(EPOLL_CLOEXEC));
    struct epoll_event event = {.events = EPOLLIN};
    MUST(epoll_ctl(set, EPOLL_CTL_ADD, echo, &event));
    for (int alternate = 0; alternate < 2; alternate++) {
        for (int restarts = 0; restarts < 2; restarts++) {
            stack_t stack = {.ss_sp = other, .ss_size = sizeof other};
            struct sigaction action = {.sa_handler = on_timer};
            action.sa_flags = (alternate ? SA_ONSTACK : 0) | (restarts ? SA_RESTART : 0);
            MUST(sigaltstack(&stack, NULL));
            MUST(sigaction(SIGALRM, &action, NULL));
            read_timed(lines, rounds);
            write_timed(sink, rounds);
            wait_timed(echo, set, rounds / 10);
            ping(echo, 100);
        }
    }
    CHECK(jumps > 0 || rounds < 100);
    kill(pid, SIGKILL);
    printf("all goes on\n");
    _exit(0);
}
