/* More threads wait than the library has numbers for, and cost nothing while nothing comes.
 *
 *     idle THREADS how
 *
 * `how`: `recv`, `poll` or `epoll`, each thread on a connection of its own, and in a set of its own.
 */
#include "common.h"
#include <dirent.h>
#include <sys/resource.h>

static const char *how = "recv";
static atomic_int are_awake;

static void *wait_on(void *connection)
{
    int fd = (intptr_t)connection;
    struct pollfd entry = {.fd = fd, .events = POLLIN};
    struct epoll_event event = {.events = EPOLLIN};
    char byte;
    if (strcmp(how, "poll") == 0) {
        CHECK(poll(&entry, 1, -1) == 1);
    } else if (strcmp(how, "epoll") == 0) {
        int set = MUST(epoll_create1(EPOLL_CLOEXEC));
        MUST(epoll_ctl(set, EPOLL_CTL_ADD, fd, &event));
        CHECK(epoll_wait(set, &event, 1, -1) == 1);
        close(set);
    }
    CHECK(recv(fd, &byte, 1, 0) == 1);
    are_awake++;
    return NULL;
}

/* How often threads of the process have gone to sleep. */
static long sleeps(void)
{
    DIR *tasks = opendir("/proc/self/task");
    long all = 0;
    CHECK(tasks != NULL);
    for (struct dirent *task; (task = readdir(tasks)) != NULL;) {
        char path[300], text[4096], *found;
        snprintf(path, sizeof path, "/proc/self/task/%s/status", task->d_name);
        int fd = open(path, O_RDONLY | O_CLOEXEC);
        if (fd < 0)
            continue;
        ssize_t n = read(fd, text, sizeof text - 1);
        close(fd);
        text[n > 0 ? n : 0] = 0;
        found = strstr(text, "\nvoluntary_ctxt_switches:");
        if (found != NULL)
            all += atol(found + sizeof "\nvoluntary_ctxt_switches:");
    }
    closedir(tasks);
    return all;
}

int main(int argc, char **argv)
{
    int threads = argc > 1 && atoi(argv[1]) > 1 ? atoi(argv[1]) : 2;
    int *fds = calloc(threads, sizeof *fds);
    struct sockaddr_in at;
    struct rlimit limit;
    pthread_attr_t small;
    if (argc > 2)
        how = argv[2];
    MUST(getrlimit(RLIMIT_NOFILE, &limit));
    limit.rlim_cur = limit.rlim_max < 16384 ? limit.rlim_max : 16384;
    MUST(setrlimit(RLIMIT_NOFILE, &limit));
    echo_process(&at);
    pthread_attr_init(&small);
    pthread_attr_setstacksize(&small, 128 << 10);
    for (int i = 0; i < threads; i++) {
        pthread_t thread;
        char byte = 0;
        fds[i] = connected(&at);
        for (int turn = 0; turn < 4; turn++)
            CHECK(put_all(fds[i], &byte, 1) == 1 && get_all(fds[i], &byte, 1) == 1);
        CHECK(pthread_create(&thread, &small, wait_on, (void *)(intptr_t)fds[i]) == 0);
        pthread_detach(thread);
    }
    /* What is on its way to a link, or back, comes to its end. Then there is a second without anything to do. */
    for (int tries = 0;; tries++) {
        long before;
        pause_us(1000000);
        before = sleeps();
        pause_us(1000000);
        if (sleeps() - before < 1000)
            break;
        CHECK(tries < 10);
    }
    for (int i = 0; i < threads; i++) {
        char byte = 1;
        CHECK(put_all(fds[i], &byte, 1) == 1);
    }
    for (double until = seconds() + 20; are_awake < threads; pause_us(1000))
        CHECK(seconds() < until);
    printf("every thread has slept, and woken\n");
    return 0;
}
