/* A connection that was inherited by a process which is killed is the other's alone: it is promoted when that uses it.
 * "child": the child is killed. "parent": the parent is. "exec": the child executes something else, which does not have
 * the connection. Says who uses it, and goes on until it is told to end.
 */
#include "common.h"

static void use(int fd)
{
    char out[512], in[512];
    memset(out, 'x', sizeof out);
    CHECK(put_all(fd, out, sizeof out) > 0);
    CHECK(get_all(fd, in, sizeof in) > 0);
}

static void go_on(int fd)
{
    struct pollfd input = {0, POLLIN, 0};
    printf("%d\n", getpid());
    while (poll(&input, 1, 1) == 0)
        use(fd);
    close(fd);
    printf("done\n");
}

int main(int argc, char **argv)
{
    struct sockaddr_in at;
    int status, is_parent = strcmp(argv[1], "parent") == 0, execs = strcmp(argv[1], "exec") == 0;
    setvbuf(stdout, NULL, _IONBF, 0);
    alarm(50);
    echo_process(&at);
    /* One that lives on, and does not have the connection: nothing is to be learned from it. */
    int first = connected(&at);
    if (MUST(fork()) == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        pause();
    }
    pid_t pid = 0, user = getpid();
    if (is_parent) {
        pid = MUST(fork());
        if (pid != 0) {
            MUST(waitpid(pid, &status, 0));
            CHECK(WTERMSIG(status) == SIGKILL);
            /* The one that uses it tells that it is done by the end of the output. */
            return 0;
        }
        user = 0;
    }
    int fd = connected(&at), ends[2];
    MUST(pipe2(ends, O_CLOEXEC));
    use(fd);
    pid = MUST(fork());
    if (pid == 0 && user != 0) {
        char *const program[] = {"sleep", "100", NULL};
        if (execs)
            execv("/bin/sleep", program);
        pause();
    }
    if (pid == 0) {
        /* Until the parent is gone. */
        alarm(50);
        while (getppid() == user || !is_parent)
            pause_us(1000);
        close(ends[1]);
        CHECK(read(ends[0], ends, 1) == 0);
        go_on(fd);
        _exit(0);
    }
    if (is_parent)
        raise(SIGKILL);
    if (execs) {
        /* Once it has, nobody else has the writing end. */
        close(ends[1]);
        CHECK(read(ends[0], ends, 1) == 0);
    } else {
        kill(pid, SIGKILL);
        MUST(waitpid(pid, &status, 0));
    }
    go_on(fd);
    kill(pid, SIGKILL);
    close(first);
    return 0;
}
