/* A thread that makes numbers and closes some, as programs of one thread do: each new one is the lowest that is free, and is what it
 * was made for until it is closed. Meanwhile other threads, which make none, use connections to servers that come and go, so that
 * the library makes links, moves connections and gives up links all the time. A child of fork has no number more than its parent.
 * With "low" the limit of open files is low, and is met: who closes a number there can make another.
 */
#include "common.h"
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/timerfd.h>

/* Of LOW numbers those from HIGH on may be the library's, and of many those far above what this program uses. */
enum { TOP = 200, LOW = 64, HIGH = 40, SERVERS = 3, WORKERS = 4, POOL = 40, SERVED = 6, REQUESTS = 40 };

/* What each number of this process stands for, as the thread knows it. */
static struct {
    int open;
    dev_t dev;
    ino_t ino;
} table[TOP];
static int own[TOP], owned;

static unsigned seed = 1;

static int draw(int below)
{
    seed = seed * 1103515245 + 12345;
    return (seed >> 16) % below;
}

static int low;

static int lowest(void)
{
    int n = 0;
    while (table[n].open)
        n++;
    return n;
}

static void note(int fd)
{
    struct stat is;
    MUST(fstat(fd, &is));
    table[fd].open = 1;
    table[fd].dev = is.st_dev;
    table[fd].ino = is.st_ino;
}

/* A number that a call has given. */
static int made(const char *by, int fd)
{
    if (fd != lowest() && !(low && lowest() >= HIGH && fd > lowest())) {
        dprintf(2, "%s gave %d (errno %d), and %d was free\n", by, fd, errno, lowest());
        _exit(1);
    }
    note(fd);
    return fd;
}

static void gone(int fd)
{
    struct stat is;
    CHECK(table[fd].open && fstat(fd, &is) == 0);
    if (is.st_dev != table[fd].dev || is.st_ino != table[fd].ino) {
        dprintf(2, "%d is not what it was\n", fd);
        _exit(1);
    }
    CHECK(close(fd) == 0);
    table[fd].open = 0;
}

static void keep(int fd)
{
    own[owned++] = fd;
}

static void drop_one(void)
{
    int i = draw(owned), fd = own[i];
    own[i] = own[--owned];
    gone(fd);
}

static struct sockaddr_in local;
static int listener;

static void make(int kind)
{
    int ends[2], fd;
    switch (kind) {
    case 0: keep(made("open", open("/dev/null", O_RDWR | O_CLOEXEC))); break;
    case 1: keep(made("socket", socket(AF_INET, SOCK_STREAM, 0))); break;
    case 2: keep(made("dup", dup(listener))); break;
    case 3: keep(made("eventfd", eventfd(0, 0))); break;
    case 4: keep(made("epoll_create1", epoll_create1(EPOLL_CLOEXEC))); break;
    case 5: keep(made("F_DUPFD", fcntl(listener, F_DUPFD, 0))); break;
    case 6: keep(made("timerfd_create", timerfd_create(CLOCK_MONOTONIC, 0))); break;
    case 7: keep(made("openat", openat(AT_FDCWD, "/", O_RDONLY | O_DIRECTORY))); break;
    case 8: keep(made("memfd_create", memfd_create("number", 0))); break;
    case 9: keep(made("openat by number", syscall(SYS_openat, AT_FDCWD, "/dev/null", O_RDONLY, 0))); break;
    case 10:
        CHECK(pipe(ends) == 0);
        keep(made("pipe", ends[0]));
        keep(made("pipe", ends[1]));
        break;
    case 11:
        CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0);
        keep(made("socketpair", ends[0]));
        keep(made("socketpair", ends[1]));
        break;
    case 12:
        fd = made("socket", socket(AF_INET, SOCK_STREAM, 0));
        MUST(connect(fd, (struct sockaddr *)&local, sizeof local));
        keep(made("accept", accept(listener, NULL, NULL)));
        gone(fd);
        break;
    default:
        /* A number of the program's choice, which is free. */
        fd = draw(2) ? lowest() : owned + 30;
        if (!table[fd].open) {
            CHECK(dup2(own[0], fd) == fd);
            note(fd);
            keep(fd);
        }
    }
}
enum { KINDS = 14, SINGLE = 9 };

/* Connections that other threads use. */
static struct worker {
    _Atomic int fd; /* 0: it has none */
    _Atomic int done;
} workers[WORKERS];

static void *work(void *arg)
{
    struct worker *me = arg;
    char out[200], in[200];
    for (;;) {
        if (atomic_load(&me->fd) == 0 || atomic_load(&me->done)) {
            pause_us(50);
            continue;
        }
        memset(out, 'x', sizeof out);
        for (int i = 0; i < REQUESTS; i++)
            if (put_all(me->fd, out, sizeof out) < 0 || get_all(me->fd, in, sizeof in) <= 0)
                break;
        atomic_store(&me->done, 1);
    }
    return NULL;
}

static struct sockaddr_in server[SERVERS];

/* In a child: ends with its parent, also one that has ended already. */
static void end_with(pid_t parent)
{
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent)
        _exit(0);
}

/* Closes what a thread is done with, and gives it another connection. */
static void attend(struct worker *worker)
{
    int fd = atomic_load(&worker->fd);
    if (fd != 0 && atomic_load(&worker->done)) {
        atomic_store(&worker->fd, 0);
        gone(fd);
        fd = 0;
    }
    if (fd == 0) {
        fd = made("socket", socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
        MUST(connect(fd, (struct sockaddr *)&server[draw(SERVERS)], sizeof server[0]));
        atomic_store(&worker->done, 0);
        atomic_store(&worker->fd, fd);
    }
}

/* Serves on `at` by children that each end after some connections, of which one may be in the middle of its use. */
static void serve(int at)
{
    pid_t me = getpid();
    for (;;) {
        pid_t child = MUST(fork());
        if (child == 0) {
            end_with(me);
            for (int i = 0; i < SERVED; i++) {
                pthread_t thread;
                int fd = MUST(accept4(at, NULL, NULL, SOCK_CLOEXEC));
                CHECK(pthread_create(&thread, NULL, echo_one, (void *)(intptr_t)fd) == 0);
                pthread_detach(thread);
            }
            pause_us(3000);
            _exit(0);
        }
        MUST(waitpid(child, NULL, 0));
    }
}

/* A child's numbers are its parent's. */
static void fork_one(void)
{
    int status;
    pid_t child = MUST(fork());
    if (child == 0) {
        for (int i = 0; i < 4; i++)
            made("open in a child", open("/dev/null", O_RDONLY));
        _exit(0);
    }
    MUST(waitpid(child, &status, 0));
    CHECK(status == 0);
}

/* Whether this process has shared memory with another. */
static int has_links(void)
{
    char line[512];
    int found = 0;
    FILE *maps = fopen("/proc/self/maps", "re");
    while (maps && fgets(line, sizeof line, maps))
        found |= strstr(line, "memfd:rdmasock-arena") != NULL;
    if (maps)
        fclose(maps);
    return found;
}

static void meet_limit(int most)
{
    while (owned < most) {
        int fd = open("/dev/null", O_RDONLY | O_CLOEXEC);
        if (fd < 0) {
            CHECK(errno == EMFILE);
            break;
        }
        keep(made("open", fd));
    }
    for (int round = 0; round < 50; round++) {
        int many = 1 + draw(3);
        for (int i = 0; i < many; i++)
            drop_one();
        for (int i = 0; i < many; i++)
            make(draw(SINGLE));
    }
    while (owned > most / 2)
        drop_one();
}

int main(int argc, char **argv)
{
    int rounds = atoi(argv[1]), linked = 0;
    pthread_t thread;
    pid_t me = getpid();
    low = argc > 2;
    signal(SIGPIPE, SIG_IGN);
    for (int i = 0; i < SERVERS; i++) {
        int at = listening(&server[i]);
        if (MUST(fork()) == 0) {
            end_with(me);
            serve(at);
        }
        close(at);
    }
    if (low) {
        struct rlimit limit = {LOW, LOW};
        MUST(setrlimit(RLIMIT_NOFILE, &limit));
    }
    listener = listening(&local);
    for (int fd = 0; fd < TOP; fd++)
        if (fcntl(fd, F_GETFD) >= 0)
            note(fd);
    keep(made("open", open("/dev/null", O_RDWR)));
    for (int i = 0; i < WORKERS; i++)
        CHECK(pthread_create(&thread, NULL, work, &workers[i]) == 0);
    for (int round = 0; round < rounds; round++) {
        attend(&workers[draw(WORKERS)]);
        if (low && round % 20 == 19)
            meet_limit(LOW);
        else if (owned < (low ? 10 : POOL))
            make(draw(KINDS));
        else
            while (owned > 5)
                drop_one();
        if (round % 500 == 499)
            fork_one();
        /* Not in the rounds that have just used up all descriptors: a link may be missing then. */
        if (round % 20 == 10 && !linked)
            linked = has_links();
    }
    if (getenv("LD_PRELOAD") && rounds > 1000)
        CHECK(linked);
    printf("done\n");
    fflush(stdout);
    _exit(0);
}
