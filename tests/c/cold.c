/* All traffic is a handler's, from the first byte on, above a thread that does nothing but allocate: whatever begins with
 * that traffic begins in the handler. In one process after the other.
 *
 *     cold PROCESSES
 */
#include "common.h"

static int own;
static volatile long ran, wrong;

static void on_timer(int signal)
{
    char out = (char)ran, in = 0;
    int kept = errno;
    (void)signal;
    if (send(own, &out, 1, MSG_NOSIGNAL) != 1 || recv(own, &in, 1, 0) != 1 || in != out)
        wrong++;
    ran++;
    errno = kept;
}

static void *idle(void *arg)
{
    pause();
    return arg;
}

static void whole(const struct sockaddr_in *at)
{
    static void *kept[64];
    unsigned seed = 1;
    pthread_t other;
    struct itimerval every = {{0, 200}, {0, 200}};
    sigset_t alarm;
    own = connected(at);
    /* With a second thread malloc has locks. */
    sigemptyset(&alarm);
    sigaddset(&alarm, SIGALRM);
    sigprocmask(SIG_BLOCK, &alarm, NULL);
    CHECK(pthread_create(&other, NULL, idle, NULL) == 0);
    sigprocmask(SIG_UNBLOCK, &alarm, NULL);
    MUST(sigaction(SIGALRM, &(struct sigaction){.sa_handler = on_timer, .sa_flags = SA_RESTART}, NULL));
    MUST(setitimer(ITIMER_REAL, &every, NULL));
    while (ran < 60) {
        void **slot = &kept[rand_r(&seed) % 64];
        free(*slot);
        *slot = malloc(2000 + rand_r(&seed) % 20000);
    }
    _exit(wrong != 0);
}

int main(int argc, char **argv)
{
    struct sockaddr_in at;
    setvbuf(stdout, NULL, _IONBF, 0);
    pid_t server = echo_process(&at);
    for (int i = 0; i < (argc > 1 ? atoi(argv[1]) : 10); i++) {
        int status = 0;
        pid_t pid = MUST(fork()), done;
        double until = seconds() + 10;
        if (pid == 0)
            whole(&at);
        while ((done = waitpid(pid, &status, WNOHANG)) == 0 && seconds() < until)
            pause_us(200);
        if (done == 0)
            kill(pid, SIGKILL);
        CHECK(done == pid && status == 0);
    }
    kill(server, SIGKILL);
    printf("none hangs\n");
    _exit(0);
}
