/* A program with one thread may enter namespaces at any time, and one with several threads is refused some. Its connections
 * go on in either case.
 *
 *     namespaces ROUNDS [connects|accepts]
 *
 * With a second argument it enters namespaces once, and then talks for ever on a connection that it has made, or accepted,
 * since.
 */
#include "common.h"
#include <linux/sched.h>
#include <net/if.h>
#include <sched.h>
#include <sys/ioctl.h>

static struct sockaddr_in at;
static int server_pid, is_loud;

/* What a call gives, in the first round. */
#define SAY(call) \
    do { \
        errno = 0; \
        int result_ = (call); \
        if (is_loud) \
            printf("%s: %d, errno %d\n", #call, result_, errno); \
    } while (0)

static void talk(int fd, int rounds)
{
    char out[512], in[512];
    for (int i = 0; i < rounds; i++) {
        memset(out, i, sizeof out);
        CHECK(put_all(fd, out, sizeof out) > 0);
        CHECK(get_all(fd, in, sizeof in) > 0);
        CHECK(memcmp(in, out, sizeof in) == 0);
    }
}

/* A connection that has been promoted, if any ever is. */
static int warm(void)
{
    int fd = connected(&at);
    for (int i = 0; i < 60; i++) {
        talk(fd, 1);
        pause_us(300);
    }
    return fd;
}

/* To the end of the stream, of which epoll tells. */
static void end(int fd)
{
    char none;
    int set = MUST(epoll_create1(EPOLL_CLOEXEC));
    struct epoll_event event = {EPOLLIN, {.fd = fd}};
    MUST(epoll_ctl(set, EPOLL_CTL_ADD, fd, &event));
    talk(fd, 2);
    MUST(shutdown(fd, SHUT_WR));
    CHECK(epoll_wait(set, &event, 1, 10000) == 1);
    CHECK(recv(fd, &none, 1, 0) == 0);
    close(fd);
    close(set);
}

static int own(const char *kind)
{
    char path[64];
    snprintf(path, sizeof path, "/proc/self/ns/%s", kind);
    return MUST(open(path, O_RDONLY | O_CLOEXEC));
}

static void user(void)
{
    SAY(unshare(CLONE_NEWUSER));
}

static void user_by_number(void)
{
    SAY(syscall(SYS_unshare, CLONE_NEWUSER));
}

static void nothing(void)
{
    SAY(unshare(CLONE_THREAD));
    SAY(unshare(CLONE_SIGHAND));
    SAY(unshare(CLONE_VM));
    SAY(unshare(0x20 | CLONE_NEWUSER));
    SAY(setns(-1, CLONE_NEWUSER));
}

static void mount(void)
{
    int fd = own("mnt");
    SAY(setns(fd, CLONE_NEWNS));
    SAY(setns(fd, 0));
    SAY(syscall(SYS_setns, fd, CLONE_NEWNS));
    SAY(setns(fd, CLONE_NEWUSER));
    SAY(unshare(CLONE_NEWUSER | CLONE_NEWNS));
}

static void time_namespace(void)
{
    int fd = own("time");
    SAY(setns(fd, 0));
    SAY(unshare(CLONE_NEWUSER | CLONE_NEWTIME));
}

/* The one that it is in, and a child's. */
static void another_user(void)
{
    int ends[2], status;
    char path[64];
    SAY(setns(own("user"), 0));
    MUST(pipe2(ends, O_CLOEXEC));
    pid_t pid = MUST(fork());
    if (pid == 0) {
        (void)!write(ends[1], unshare(CLONE_NEWUSER) == 0 ? "y" : "n", 1);
        pause();
    }
    CHECK(read(ends[0], path, 1) == 1);
    snprintf(path, sizeof path, "/proc/%d/ns/user", pid);
    int fd = MUST(open(path, O_RDONLY | O_CLOEXEC));
    SAY(setns(fd, CLONE_NEWUSER));
    kill(pid, SIGKILL);
    MUST(waitpid(pid, &status, 0));
}

/* From here on only processes can be made. */
static void process_ids(void)
{
    int status;
    SAY(unshare(CLONE_NEWUSER | CLONE_NEWPID));
    pid_t pid = MUST(fork());
    if (pid == 0) {
        if (is_loud)
            printf("child %d\n", getpid());
        end(warm());
        _exit(0);
    }
    MUST(waitpid(pid, &status, 0));
    CHECK(status == 0);
}

static void process_ids_before(void)
{
    SAY(unshare(CLONE_NEWPID));
    SAY(unshare(CLONE_NEWUSER));
}

/* Where the same address is another host's. */
static void network(void)
{
    struct ifreq lo = {.ifr_name = "lo", .ifr_flags = IFF_UP};
    SAY(unshare(CLONE_NEWUSER | CLONE_NEWNET));
    int fd = MUST(socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0));
    if (ioctl(fd, SIOCSIFFLAGS, &lo) != 0)
        return;
    server_pid = echo_process(&at);
}

static void *wait_for(void *mutex)
{
    pthread_mutex_lock(mutex);
    pthread_mutex_unlock(mutex);
    return NULL;
}

static void threads(void)
{
    pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
    pthread_t thread;
    pthread_mutex_lock(&mutex);
    CHECK(pthread_create(&thread, NULL, wait_for, &mutex) == 0);
    SAY(unshare(CLONE_NEWUSER));
    SAY(syscall(SYS_unshare, CLONE_NEWUSER));
    SAY(setns(own("mnt"), CLONE_NEWNS));
    pthread_mutex_unlock(&mutex);
    pthread_join(thread, NULL);
    /* For the kernel the thread ends a moment later. */
    while (unshare(CLONE_NEWUSER) != 0)
        CHECK(errno == EINVAL);
    pthread_mutex_lock(&mutex);
    CHECK(pthread_create(&thread, NULL, wait_for, &mutex) == 0);
    SAY(unshare(CLONE_NEWUSER | CLONE_NEWPID));
    pthread_mutex_unlock(&mutex);
    pthread_join(thread, NULL);
}

static void enter(const char *name, void (*how)(void))
{
    int status;
    fflush(stdout);
    pid_t pid = MUST(fork());
    if (pid == 0) {
        char out[512] = "unread", in[512];
        int fd = warm(), other = warm();
        alarm(20);
        if (is_loud)
            printf("%s\n", name);
        CHECK(put_all(fd, out, sizeof out) > 0);
        how();
        CHECK(get_all(fd, in, sizeof in) > 0);
        CHECK(memcmp(in, out, sizeof in) == 0);
        end(fd);
        fd = warm();
        talk(other, 20);
        end(other);
        end(fd);
        fflush(stdout);
        if (server_pid != 0)
            kill(server_pid, SIGKILL);
        _exit(0);
    }
    MUST(waitpid(pid, &status, 0));
    if (status != 0) {
        dprintf(2, "%s: status %x\n", name, status);
        _exit(1);
    }
}

static void put_file(const char *path, const char *text)
{
    int fd = MUST(open(path, O_WRONLY | O_CLOEXEC));
    MUST(write(fd, text, strlen(text)));
    close(fd);
}

/* Enters namespaces in which its user is known. */
static void move(void)
{
    char map[64];
    snprintf(map, sizeof map, "0 %d 1", getuid());
    int result = unshare(CLONE_NEWUSER);
    if (result != 0 && (errno == EPERM || errno == ENOSPC)) {
        printf("no user namespaces here\n");
        exit(0);
    }
    MUST(result);
    put_file("/proc/self/uid_map", map);
    MUST(unshare(CLONE_NEWNS));
    MUST(setns(own("mnt"), CLONE_NEWNS));
    printf("moved\n");
    fflush(stdout);
}

static void connects(void)
{
    close(warm());
    move();
    for (int fd = warm();;)
        talk(fd, 1);
}

static void accepts(void)
{
    int ends[2], listener = listening(&at);
    char none;
    MUST(pipe2(ends, O_CLOEXEC));
    if (MUST(fork()) == 0) {
        close(listener);
        close(ends[1]);
        close(warm());
        (void)!read(ends[0], &none, 1);
        for (int fd = warm();;)
            talk(fd, 1);
    }
    echo_one((void *)(intptr_t)MUST(accept(listener, NULL, NULL)));
    move();
    MUST(write(ends[1], "x", 1));
    echo_one((void *)(intptr_t)MUST(accept(listener, NULL, NULL)));
}

int main(int argc, char **argv)
{
    int rounds = argc > 1 ? atoi(argv[1]) : 1;
    if (argc > 2 && strcmp(argv[2], "accepts") == 0)
        accepts();
    echo_process(&at);
    if (argc > 2)
        connects();
    for (int i = 0; i < rounds; i++) {
        is_loud = i == 0;
        alarm(80);
        enter("user", user);
        enter("user by number", user_by_number);
        enter("nothing", nothing);
        enter("mount", mount);
        enter("time", time_namespace);
        enter("another user", another_user);
        enter("process ids", process_ids);
        enter("process ids before", process_ids_before);
        enter("network", network);
        enter("threads", threads);
    }
    return 0;
}
