/* Children that are made by clone in its several forms, each with a copy of the memory and of the descriptors: what they
 * inherit and what they open is theirs to use, and the parent goes on. A child that is made by a system call in line
 * closes what it has inherited, and uses what it opens.
 */
#include "common.h"
#include <linux/sched.h>
#include <sched.h>

static struct sockaddr_in at;
static int fd, other;

static void use(int fd, int rounds)
{
    char out[512], in[512];
    for (int i = 0; i < rounds; i++) {
        memset(out, i, sizeof out);
        CHECK(put_all(fd, out, sizeof out) > 0);
        CHECK(get_all(fd, in, sizeof in) > 0);
        CHECK(memcmp(in, out, sizeof in) == 0);
    }
}

/* Until it is promoted, if it ever is. */
static int warm(void)
{
    int fd = connected(&at);
    for (int i = 0; i < 100; i++) {
        use(fd, 1);
        pause_us(300);
    }
    return fd;
}

static pid_t by_function(int (*work)(void *))
{
    static char stack[65536] __attribute__((aligned(16)));
    return clone(work, stack + sizeof stack, SIGCHLD, NULL);
}

static pid_t by_clone3(int (*work)(void *))
{
    struct clone_args args = {.exit_signal = SIGCHLD};
    pid_t pid = syscall(SYS_clone3, &args, sizeof args);
    if (pid == 0)
        _exit(work(NULL));
    return pid;
}

static pid_t in_line(int (*work)(void *))
{
    long pid;
#ifdef __x86_64__
    register long r10 __asm__("r10") = 0, r8 __asm__("r8") = 0;
    __asm__ volatile("syscall" : "=a"(pid) : "a"(SYS_clone), "D"(SIGCHLD), "S"(0), "d"(0), "r"(r10), "r"(r8) : "rcx", "r11", "memory");
#else
    register long x0 __asm__("x0") = SIGCHLD, x1 __asm__("x1") = 0, x2 __asm__("x2") = 0, x3 __asm__("x3") = 0, x4 __asm__("x4") = 0;
    register long x8 __asm__("x8") = SYS_clone;
    __asm__ volatile("svc #0" : "+r"(x0) : "r"(x1), "r"(x2), "r"(x3), "r"(x4), "r"(x8) : "memory");
    pid = x0;
#endif
    if (pid == 0)
        _exit(work(NULL));
    return pid;
}

/* What any child may do: close, open, wait, make children of its own. */
static int uses_its_own(void *nothing)
{
    alarm(20);
    CHECK(close(other) == 0);
    int mine = connected(&at), set = MUST(epoll_create1(EPOLL_CLOEXEC)), listener = listening(&(struct sockaddr_in){0});
    struct epoll_event event = {EPOLLIN, {.fd = mine}};
    MUST(epoll_ctl(set, EPOLL_CTL_ADD, mine, &event));
    use(mine, 40);
    CHECK(put_all(mine, "x", 1) > 0);
    CHECK(epoll_wait(set, &event, 1, -1) == 1);
    CHECK(recv(mine, &event, 1, 0) == 1);
    MUST(dup2(mine, fd));
    use(fd, 2);
    pid_t pid = MUST(fork());
    if (pid == 0) {
        use(mine, 3);
        exit(7);
    }
    int status;
    MUST(waitpid(pid, &status, 0));
    CHECK(WEXITSTATUS(status) == 7);
    CHECK(close(mine) == 0 && close(set) == 0 && close(listener) == 0);
    use(fd, 2);
    MUST(close_range(3, ~0U, 0));
    return 0;
}

/* And what it has inherited. */
static int uses_all(void *nothing)
{
    alarm(20);
    use(fd, 20);
    return uses_its_own(nothing);
}

static int echo_one_fd(void *nothing)
{
    alarm(20);
    echo_one((void *)(intptr_t)fd);
    return 0;
}

/* A connection that the parent has accepted and used, and whose peer finds it worth promoting: a child that is made in
 * line serves it, and reads nothing that the peer has not sent. */
static void serves_in_line(void)
{
    struct sockaddr_in own;
    int status, listener = listening(&own);
    pid_t client = MUST(fork());
    if (client == 0) {
        int fd = connected(&own);
        for (int i = 0; i < 300; i++) {
            use(fd, 1);
            pause_us(i > 1 && i < 50 ? 1000 : 0);
        }
        _exit(0);
    }
    fd = MUST(accept(listener, NULL, NULL));
    char buf[512];
    CHECK(get_all(fd, buf, sizeof buf) > 0 && put_all(fd, buf, sizeof buf) > 0);
    pid_t server = in_line(echo_one_fd);
    MUST(waitpid(client, &status, 0));
    CHECK(status == 0);
    MUST(waitpid(server, &status, 0));
    close(fd);
    close(listener);
    printf("served in line\n");
}

static void make(const char *name, pid_t (*start)(int (*)(void *)), int (*work)(void *))
{
    int status;
    fd = warm();
    other = warm();
    pid_t pid = MUST(start(work));
    MUST(waitpid(pid, &status, 0));
    if (status != 0) {
        dprintf(2, "%s: status %x\n", name, status);
        _exit(1);
    }
    use(fd, 10);
    use(other, 10);
    MUST(close(fd));
    MUST(close(other));
    printf("%s\n", name);
}

int main(int argc, char **argv)
{
    setvbuf(stdout, NULL, _IONBF, 0);
    alarm(60);
    echo_process(&at);
    make("clone", by_function, uses_all);
    make("clone3", by_clone3, uses_all);
    make("in line", in_line, uses_its_own);
    serves_in_line();
    return 0;
}
