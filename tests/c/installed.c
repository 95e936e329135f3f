/* Signal handlers are as a program has installed them: what sigaction and signal say of them, and what a handler is told, each signal
 * once and in order, however busy the thread is with connections.
 *
 *     installed ROUNDS
 */
#include "common.h"
#pragma GCC diagnostic ignored "-Wdeprecated-declarations" /* sigset */

static volatile int last = -1, wrong, plain, once;
static volatile long nested;

static void told(int signal, siginfo_t *info, void *context)
{
    ucontext_t *interrupted = context;
    if (signal != SIGRTMIN || info->si_signo != SIGRTMIN || info->si_code != SI_QUEUE || info->si_pid != getpid())
        wrong++;
    if (info->si_value.sival_int != last + 1)
        wrong++;
    /* What it has interrupted goes on with it unblocked. */
    if (sigismember(&interrupted->uc_sigmask, SIGRTMIN))
        wrong++;
    last = info->si_value.sival_int;
}

static void count(int signal)
{
    (void)signal;
    plain++;
}

static void count_once(int signal)
{
    (void)signal;
    once++;
}

/* With SA_NODEFER another may come above it, once at a time. */
static void nests(int signal)
{
    (void)signal;
    nested++;
}

static struct sockaddr_in at;
static pthread_t talker;
static atomic_int over;
static int rounds;

static void *send_signals(void *arg)
{
    for (int i = 0; i < rounds; i++) {
        union sigval value = {.sival_int = i};
        int error;
        /* As many as may be queued. */
        while ((error = pthread_sigqueue(talker, SIGRTMIN, value)) == EAGAIN)
            pause_us(100);
        CHECK(error == 0);
        pthread_kill(talker, SIGUSR1);
        pthread_kill(talker, SIGUSR2);
        pause_us(50);
    }
    over = 1;
    return arg;
}

/* SA_RESTORER, 0x04000000, is between libc and the kernel. */
static void *by_signal(int number, void (*handler)(int))
{
    return (void *)signal(number, handler);
}

int main(int argc, char **argv)
{
    struct sigaction action = {.sa_sigaction = told, .sa_flags = SA_SIGINFO | SA_RESTART}, before;
    struct sigaction other = {.sa_handler = nests, .sa_flags = SA_NODEFER | SA_RESTART};
    pthread_t thread;
    char ask[64] = "ask", answer[64];
    rounds = argc > 1 ? atoi(argv[1]) : 1000;
    setvbuf(stdout, NULL, _IONBF, 0);
    pid_t pid = echo_process(&at);
    sigaddset(&action.sa_mask, SIGUSR1);
    MUST(sigaction(SIGRTMIN, &action, NULL));
    MUST(sigaction(SIGRTMIN, NULL, &before));
    CHECK(before.sa_sigaction == told && (before.sa_flags & ~0x04000000) == (SA_SIGINFO | SA_RESTART));
    CHECK(sigismember(&before.sa_mask, SIGUSR1) == 1 && sigismember(&before.sa_mask, SIGUSR2) == 0);
    CHECK(by_signal(SIGUSR1, count) == (void *)SIG_DFL);
    CHECK(by_signal(SIGUSR1, SIG_IGN) == (void *)count);
    CHECK(by_signal(SIGUSR1, count) == (void *)SIG_IGN);
    MUST(sigaction(SIGUSR1, NULL, &before));
    CHECK(before.sa_handler == count && (before.sa_flags & ~0x04000000) == SA_RESTART);
    /* The one struct for both. */
    struct sigaction *volatile same = &before;
    before.sa_handler = count_once;
    MUST(sigaction(SIGUSR1, &before, same));
    CHECK(before.sa_handler == count);
    MUST(sigaction(SIGUSR1, &before, same));
    CHECK(before.sa_handler == count_once);
    CHECK(sigaction(SIGKILL, &other, NULL) == -1 && errno == EINVAL);
    CHECK(sigaction(1000, &other, NULL) == -1 && errno == EINVAL);
    CHECK(sigaction(0, &other, NULL) == -1 && errno == EINVAL);
    CHECK(by_signal(SIGKILL, count) == (void *)SIG_ERR && errno == EINVAL);
    MUST(sigaction(SIGUSR2, &other, NULL));
    /* For one signal. */
    struct sigaction single = {.sa_handler = count_once, .sa_flags = SA_RESETHAND};
    MUST(sigaction(SIGHUP, &single, NULL));
    raise(SIGHUP);
    MUST(sigaction(SIGHUP, NULL, &before));
    CHECK(once == 1 && before.sa_handler == SIG_DFL);
    CHECK(sigset(SIGHUP, count_once) == SIG_DFL && sigset(SIGHUP, SIG_DFL) == count_once);

    talker = pthread_self();
    CHECK(pthread_create(&thread, NULL, send_signals, NULL) == 0);
    int fd = connected(&at);
    for (int i = 0; !over; i++) {
        ask[10] = i;
        CHECK(put_all(fd, ask, sizeof ask) > 0 && get_all(fd, answer, sizeof answer) > 0);
        CHECK(memcmp(ask, answer, sizeof ask) == 0);
    }
    pthread_join(thread, NULL);
    CHECK(wrong == 0 && last == rounds - 1);
    CHECK(plain > 0 && nested > 0);
    /* All came to their end: none is blocked. */
    sigset_t blocked, none;
    sigemptyset(&none);
    MUST(sigprocmask(SIG_SETMASK, NULL, &blocked));
    CHECK(memcmp(&blocked, &none, 8) == 0);
    kill(pid, SIGKILL);
    printf("each came once\n");
    _exit(0);
}
