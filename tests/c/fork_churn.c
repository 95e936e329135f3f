/* Forks and execs, again and again, while threads make, use and close connections and epoll sets. Each child must come to
 * its end, in whatever the other threads were when it was forked.
 *
 *     fork_churn ROUNDS REQUESTS
 */
#include "common.h"

static struct sockaddr_in address;
static int requests;
static atomic_long made;

static void *churn(void *arg)
{
    char out[64], in[64];
    unsigned seed = (intptr_t)arg;
    for (;;) {
        int fd = connected(&address), set = MUST(epoll_create1(EPOLL_CLOEXEC));
        struct epoll_event event = {.events = EPOLLIN};
        MUST(epoll_ctl(set, EPOLL_CTL_ADD, fd, &event));
        int count = 1 + rand_r(&seed) % requests;
        for (int i = 0; i < count; i++) {
            memset(out, i, sizeof out);
            CHECK(put_all(fd, out, sizeof out) > 0);
            if (i & 1)
                epoll_wait(set, &event, 1, -1);
            CHECK(get_all(fd, in, sizeof in) > 0);
            CHECK(memcmp(in, out, sizeof in) == 0);
        }
        /* Not thousands in TIME_WAIT. */
        struct linger reset = {1, 0};
        MUST(setsockopt(fd, SOL_SOCKET, SO_LINGER, &reset, sizeof reset));
        if (count & 2)
            close(set);
        close(fd);
        if (!(count & 2))
            close(set);
        atomic_fetch_add(&made, 1);
    }
    return NULL;
}

/* What a child does: all of these end it. */
static void in_child(int round)
{
    char *const good[] = {"true", NULL}, *const none[] = {"none", NULL};
    switch (round % 5) {
    case 0:
        if (round % 20 == 0)
            execv("/bin/true", good);
        /* fall through: it fails, and the child goes on. */
    case 1:
        execv("/nonexistent/program", none);
        _exit(errno == ENOENT ? 0 : 3);
    case 2: {
        int fd = socket(AF_INET, SOCK_STREAM, 0);
        if (fd < 0)
            _exit(4);
        close(fd);
        close_range(3, ~0U, 0);
        _exit(0);
    }
    default:
        exit(0);
    }
}

int main(int argc, char **argv)
{
    int rounds = argc > 1 ? atoi(argv[1]) : 1000;
    requests = argc > 2 ? atoi(argv[2]) : 4;
    setvbuf(stdout, NULL, _IONBF, 0);
    echo_process(&address);
    for (intptr_t i = 0; i < 3; i++) {
        pthread_t thread;
        CHECK(pthread_create(&thread, NULL, churn, (void *)(i + 1)) == 0);
        if (i & 1)
            pthread_detach(thread);
    }
    while (made < 10)
        pause_us(100);
    for (int round = 0; round < rounds; round++) {
        int status;
        pid_t pid;
        if (round % 8 == 7)
            pid = MUST(_Fork());
        else if (round % 8 == 3)
            pid = MUST(syscall(SYS_clone, SIGCHLD, NULL, NULL, NULL, NULL));
        else
            pid = MUST(fork());
        if (pid == 0) {
            /* Where libc has not put its own locks right a child may exec and end, no more. */
            if (round % 4 == 3) {
                char *const none[] = {"none", NULL};
                execve("/nonexistent/program", none, none);
                _exit(0);
            }
            in_child(round);
        }
        double until = seconds() + 20;
        pid_t done;
        while ((done = waitpid(pid, &status, WNOHANG)) == 0 && seconds() < until)
            pause_us(50);
        if (done == 0) {
            char command[64];
            dprintf(2, "the child of round %d hangs\n", round);
            if (getenv("KEEP_CHILD")) {
                snprintf(command, sizeof command, "gdb -p %d -batch -ex bt", pid);
                (void)!system(command);
            }
            kill(pid, SIGKILL);
            _exit(1);
        }
        if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) {
            dprintf(2, "the child of round %d ended with status %#x\n", round, status);
            _exit(1);
        }
    }
    printf("all children have ended\n");
    _exit(0);
}
