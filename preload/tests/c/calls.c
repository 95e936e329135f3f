/* Makes hooked calls that are hard to forward, and prints their results: variadic calls, calls that start or end a
 * process, and I/O inside libc. The output has to be the same with and without the library. */
#define _GNU_SOURCE
#include <aio.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <spawn.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/select.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

extern char **environ;
static char *self;
static char *mark_env[] = {"MARK=execle", NULL};

/* Runs in the new program. Checks that the arguments are "show" KIND COUNT 1 2 … COUNT. Returns the exit status. */
static int show(int argc, char **argv)
{
    const char *kind = argv[2], *mark = getenv("MARK");
    int count = atoi(argv[3]);
    if (argc != count + 4)
        return 10;
    for (int i = 1; i <= count; i++)
        if (atoi(argv[i + 3]) != i)
            return 11;
    if (!!strchr(kind, 'e') != (mark && !strcmp(mark, "execle")))
        return 12;
    return 0;
}

#define A0
#define A1 A0 "1",
#define A2 A1 "2",
#define A3 A2 "3",
#define A4 A3 "4",
#define A5 A4 "5",
#define A6 A5 "6",
#define A7 A6 "7",
#define A8 A7 "8",
#define A9 A8 "9",
#define A10 A9 "10",
#define A11 A10 "11",
#define A12 A11 "12",
#define CASES(X) X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11) X(12)

/* Only the kind with an environment has an 'e' in its name, which `show` checks. */
static int exec_with(char kind, int count, const char *path)
{
    switch (kind * 100 + count) {
#define L(n) case 'l' * 100 + n: return execl(path, path, "show", "l", #n, A##n (char *)NULL);
#define P(n) case 'p' * 100 + n: return execlp(path, path, "show", "p", #n, A##n (char *)NULL);
#define E(n) case 'e' * 100 + n: return execle(path, path, "show", "e", #n, A##n (char *)NULL, mark_env);
        CASES(L) CASES(P) CASES(E)
    }
    return -2;
}

static int status_of(pid_t pid)
{
    int status = -1;
    waitpid(pid, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status);
}

static void exec_variadic(void)
{
    for (const char *kind = "lpe"; *kind; kind++)
        for (int count = 0; count <= 12; count++) {
            pid_t forked = fork();
            if (forked == 0) {
                exec_with(*kind, count, self);
                _exit(20);
            }
            int by_fork = status_of(forked);
            pid_t vforked = vfork();
            if (vforked == 0) {
                exec_with(*kind, count, self);
                _exit(20);
            }
            int by_vfork = status_of(vforked);
            errno = 0;
            int failed = exec_with(*kind, count, "/nonexistent/program");
            printf("execl%c %d: %d %d, failing %d %s\n", *kind, count, by_fork, by_vfork, failed,
                   strerror(errno));
        }
}

static void vfork_shares(void)
{
    volatile int seen = 0;
    pid_t pid = vfork();
    if (pid == 0) {
        seen = 1;
        _exit(7);
    }
    printf("vfork: shared %d, status %d\n", seen, status_of(pid));
}

static void exec_plain(void)
{
    char *argv[] = {self, "show", "l", "1", "1", NULL};
    char *argv_env[] = {self, "show", "e", "1", "1", NULL};
    for (int i = 0; i < 6; i++) {
        pid_t pid = fork();
        if (pid == 0) {
            switch (i) {
            case 0: execv(self, argv); break;
            case 1: execvp(self, argv); break;
            case 2: execve(self, argv_env, mark_env); break;
            case 3: execvpe(self, argv_env, mark_env); break;
            case 4: fexecve(open(self, O_RDONLY), argv_env, mark_env); break;
            case 5: execveat(AT_FDCWD, self, argv_env, mark_env, 0); break;
            }
            _exit(20);
        }
        printf("exec %d: %d\n", i, status_of(pid));
    }
    for (int i = 0; i < 3; i++) {
        pid_t pid = 0;
        const char *path = i == 2 ? "/nonexistent/program" : self;
        int error = (i == 0 ? posix_spawn : posix_spawnp)(&pid, path, NULL, NULL, argv, environ);
        printf("posix_spawn %d: %d %d\n", i, error, error ? 0 : status_of(pid));
    }
    char line[64] = "";
    FILE *f = popen("echo from popen", "r");
    printf("popen: %s", fgets(line, sizeof line, f) ? line : "nothing\n");
    printf("pclose: %d\n", pclose(f));
    printf("system: %d\n", WEXITSTATUS(system("exit 3")));
}

static void exits(void)
{
    for (int i = 0; i < 5; i++) {
        fflush(stdout);
        pid_t pid = i == 4 ? _Fork() : fork();
        if (pid == 0)
            switch (i) {
            case 0: _exit(1);
            case 1: _Exit(2);
            case 2: quick_exit(3);
            case 3: exit(4);
            case 4: _exit(5);
            }
        printf("exit %d: %d\n", i, status_of(pid));
    }
}

static void print_to(int fd, const char *format, ...)
{
    va_list list;
    va_start(list, format);
    vdprintf(fd, format, list);
    va_end(list);
}

#define FORMAT "%d %s %.1f %d %d %.2f %d %d %d %.3f %.1f %.1f %.1f %.1f %.1f %.1f %.1f %Lg %ld|"
#define ARGUMENTS 1, "two", 3.5, 4, 5, 6.25, 7, 8, 9, 10.125, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7, 1.25L, 1L << 40

static void inside_libc(int a, int b)
{
    char buf[512] = "";
    const char *volatile format = FORMAT; /* so that it stays a variadic call */
    dprintf(a, format, ARGUMENTS);
    print_to(a, format, ARGUMENTS);
    dprintf(a, "plain|");
    ssize_t n = read(b, buf, sizeof buf - 1);
    printf("dprintf: %zd %s\n", n, buf);

    FILE *f = fdopen(dup(a), "w");
    fprintf(f, "stdio");
    fclose(f);
    struct aiocb block = {.aio_fildes = b, .aio_buf = buf, .aio_nbytes = 5};
    memset(buf, 0, sizeof buf);
    const struct aiocb *blocks[] = {&block};
    int started = aio_read(&block);
    aio_suspend(blocks, 1, NULL);
    printf("aio_read: %d %d %zd %s\n", started, aio_error(&block), aio_return(&block), buf);
}

static void bytes(int a, int b, int variable)
{
    char buf[16];
    struct iovec iov = {buf, sizeof buf};
    struct msghdr m = {.msg_iov = &iov, .msg_iovlen = 1};
    struct mmsghdr mm = {.msg_hdr = m};
    int pipes[2], file = open("/proc/self/exe", O_RDONLY);
    off_t offset = 0;
    (void)!pipe(pipes);
    memset(buf, 'b', sizeof buf);
    printf("out: %zd %zd %zd %zd %zd %zd %d %zd\n", send(a, buf, 1, 0), sendto(a, buf, 2, 0, NULL, 0),
           write(a, buf, 3), writev(a, &iov, 1), pwritev2(a, &iov, 1, -1, 0), sendmsg(a, &m, 0),
           sendmmsg(a, &mm, 1, 0), sendfile(a, file, &offset, 5));
    int waiting = 0;
    ioctl(b, FIONREAD, &waiting);
    printf("waiting: %d\n", waiting);
    /* The compiler does not know this length, so it calls the fortified forms. */
    size_t len = variable;
    printf("in: %zd %zd %zd", read(b, buf, len), recv(b, buf, len, MSG_PEEK), recvfrom(b, buf, len, 0, NULL, NULL));
    printf(" %zd %zd %zd %d\n", readv(b, &iov, 1), preadv2(b, &iov, 1, -1, 0), recvmsg(b, &m, 0),
           recvmmsg(b, &mm, 1, MSG_DONTWAIT, NULL));
    printf("splice: %zd", splice(b, NULL, pipes[1], NULL, 4, 0));
    printf(" %zd\n", splice(pipes[0], NULL, a, NULL, 4, 0));
    ssize_t teed = tee(a, pipes[1], 1, 0);
    printf("tee of a socket: %zd %s\n", teed, strerror(errno));
    close(pipes[0]);
    close(pipes[1]);
    close(file);
    while (recv(b, buf, sizeof buf, MSG_DONTWAIT) > 0)
        ;
}

static void readiness(int a, int b, int variable)
{
    struct pollfd fds[2] = {{a, POLLIN | POLLOUT, 0}, {b, POLLIN | POLLOUT, 0}};
    struct timespec zero = {0, 0};
    struct timeval none = {0, 0};
    struct epoll_event event = {.events = EPOLLIN | EPOLLOUT};
    fd_set set;
    (void)!write(a, "x", 1);
    int n = poll(fds, variable, 0), m = ppoll(fds, variable, &zero, NULL);
    printf("poll: %d %d %x %x\n", n, m, fds[0].revents, fds[1].revents);
    FD_ZERO(&set);
    FD_SET(b, &set);
    n = select(b + 1, &set, NULL, NULL, &none);
    m = pselect(b + 1, &set, NULL, NULL, &zero, NULL);
    printf("select: %d %d\n", n, m);
    int e = epoll_create(1), f = epoll_create1(EPOLL_CLOEXEC);
    epoll_ctl(e, EPOLL_CTL_ADD, b, &event);
    printf("epoll: %d %d %d %x\n", epoll_wait(e, &event, 1, 0), epoll_pwait(e, &event, 1, 0, NULL),
           epoll_pwait2(e, &event, 1, &zero, NULL), event.events);
    close(e);
    close(f);
    recv(b, &n, 1, 0);
}

static void descriptors(int a)
{
    int d = dup(a), e = fcntl(a, F_DUPFD_CLOEXEC, 100), value = 0;
    socklen_t len = sizeof value;
    printf("dup: %d %d %d %d\n", d >= 0, e, dup2(a, 110), dup3(a, 111, O_CLOEXEC));
    printf("flags: %x %d %d\n", fcntl(111, F_GETFD), fcntl(110, F_SETFL, O_NONBLOCK),
           !!(fcntl(a, F_GETFL) & O_NONBLOCK));
    fcntl(110, F_SETFL, 0);
    printf("getsockopt: %d", getsockopt(a, SOL_SOCKET, SO_TYPE, &value, &len));
    printf(" %d\n", value);
    printf("close_range: %d\n", close_range(110, 111, 0));
    closefrom(100);
    int closed = close(d), again = close(e);
    printf("close: %d %d %s\n", closed, again, strerror(errno));
}

int main(int argc, char **argv)
{
    int ends[2];
    self = argv[0];
    if (argc > 1 && !strcmp(argv[1], "show"))
        return show(argc, argv);
    if (socketpair(AF_UNIX, SOCK_STREAM, 0, ends))
        return 2;
    setvbuf(stdout, NULL, _IONBF, 0);
    bytes(ends[0], ends[1], argc + 3);
    readiness(ends[0], ends[1], argc + 1);
    inside_libc(ends[0], ends[1]);
    descriptors(ends[0]);
    exec_variadic();
    exec_plain();
    vfork_shares();
    exits();
    if (daemon(1, 1))
        return 3;
    printf("daemon\n");
    return 0;
}
