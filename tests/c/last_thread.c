/* A process ends when its last thread ends, whichever that is: libc then calls exit(0) in it. Its main thread has ended long
 * before, in each way that does not end the process.
 *
 *     last_thread ROUNDS how
 *
 * `how`: `exit`, main calls pthread_exit while others talk; `cancel`, it is cancelled; `alone`, there are no others;
 * `unconnected`, they have a socket and no connection; `child`, a thread forks, and the child's only thread returns;
 * `late`, others only begin to talk when main is gone.
 */
#include "common.h"

static struct sockaddr_in at;
static int rounds;
static pthread_t main_thread;

static void goodbye(void)
{
    printf("goodbye\n");
}

/* The main thread is a zombie as soon as it has ended. */
static void until_main_has_ended(void)
{
    for (;;) {
        char path[64], text[512], *state;
        snprintf(path, sizeof path, "/proc/%d/task/%d/stat", getpid(), getpid());
        int fd = MUST(open(path, O_RDONLY | O_CLOEXEC));
        ssize_t n = MUST(read(fd, text, sizeof text - 1));
        close(fd);
        text[n] = 0;
        state = strrchr(text, ')');
        CHECK(state != NULL);
        if (state[2] == 'Z')
            return;
        pause_us(1000);
    }
}

static void talk_on(int fd)
{
    char ask[64] = "ask", answer[64];
    for (int i = 0; i < rounds; i++) {
        ask[10] = i;
        CHECK(put_all(fd, ask, sizeof ask) > 0);
        CHECK(get_all(fd, answer, sizeof answer) > 0);
        CHECK(memcmp(ask, answer, sizeof ask) == 0);
    }
}

static void *talk(void *arg)
{
    if (arg != NULL)
        until_main_has_ended();
    int fd = connected(&at);
    talk_on(fd);
    until_main_has_ended();
    talk_on(fd);
    close(fd);
    /* By returning and by pthread_exit. */
    if (arg != NULL)
        pthread_exit(NULL);
    return NULL;
}

static void *hold(void *arg)
{
    int fd = MUST(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    until_main_has_ended();
    close(fd);
    return arg;
}

static void *cancel(void *arg)
{
    CHECK(pthread_cancel(main_thread) == 0);
    return talk(arg);
}

/* Its child has one thread, which is this one and returns from here. */
static void *fork_and_return(void *arg)
{
    int status;
    pid_t pid = MUST(fork());
    if (pid == 0) {
        int fd = connected(&at);
        talk_on(fd);
        return arg;
    }
    MUST(waitpid(pid, &status, 0));
    CHECK(status == 0);
    exit(0);
}

static void begin(void *(*what)(void *), void *arg)
{
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, what, arg) == 0);
    CHECK(pthread_detach(thread) == 0);
}

int main(int argc, char **argv)
{
    const char *how = argc > 2 ? argv[2] : "alone";
    rounds = atoi(argv[1]);
    setvbuf(stdout, NULL, _IONBF, 0);
    main_thread = pthread_self();
    echo_process(&at);
    if (strcmp(how, "child") != 0)
        atexit(goodbye);
    if (strcmp(how, "exit") == 0) {
        begin(talk, NULL);
        begin(talk, NULL);
    } else if (strcmp(how, "late") == 0) {
        begin(talk, "late");
        begin(talk, "late");
    } else if (strcmp(how, "cancel") == 0) {
        begin(cancel, NULL);
        pause();
    } else if (strcmp(how, "unconnected") == 0) {
        begin(hold, NULL);
    } else if (strcmp(how, "child") == 0) {
        printf("goodbye\n");
        begin(fork_and_return, NULL);
    } else {
        talk_on(connected(&at));
    }
    pthread_exit(NULL);
}
