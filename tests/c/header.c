/* What include/rdmasock.h has: `header CASE WAY` plays a case between this process, which serves, and one that it forks
 * before there is any socket, which connects. WAY is what both directions come to run on: none (without the library),
 * tcp, shm or rdma. It prints nothing, and ends well if all is as the header says. */
#include "common.h"
#include "rdmasock.h"

static const char *way;
static int expected;
static int is_server;
static pid_t client;
/* One byte each says that the other side may go on; not the connection's business. */
static int tells[2][2];

static void tell(void)
{
    MUST(write(tells[is_server][1], "", 1));
}

static void hear(void)
{
    char byte;
    CHECK(read(tells[!is_server][0], &byte, 1) == 1);
}

static void meet(void)
{
    tell();
    hear();
}

/* Byte number `at` of each stream. */
static unsigned char byte_at(uint64_t at)
{
    return (unsigned char)(at * 31 + (at >> 9) * 7 + (at >> 17));
}

static void put(int fd, uint64_t at, size_t len)
{
    unsigned char *bytes = malloc(len);
    for (size_t i = 0; i < len; i++)
        bytes[i] = byte_at(at + i);
    CHECK(put_all(fd, bytes, len) == (ssize_t)len);
    free(bytes);
}

static void check(const void *bytes, uint64_t at, size_t len)
{
    for (size_t i = 0; i < len; i++)
        CHECK(((const unsigned char *)bytes)[i] == byte_at(at + i));
}

static void get(int fd, uint64_t at, size_t len)
{
    unsigned char *bytes = malloc(len);
    CHECK(get_all(fd, bytes, len) == (ssize_t)len);
    check(bytes, at, len);
    free(bytes);
}

static struct rdmasock_info info_of(int fd)
{
    struct rdmasock_info info;
    info.size = sizeof info;
    MUST(rdmasock_info(fd, &info));
    return info;
}

static int runs_on(int fd, unsigned by)
{
    struct rdmasock_info info = info_of(fd);
    /* Who has accepted need never hear why it stays on TCP. */
    int is_settled = is_server || by != RDMASOCK_TCP || info.why != RDMASOCK_WHY_BELOW_THRESHOLD;
    return info.sends_by == by && info.receives_by == by && is_settled;
}

/* Questions and answers until both directions run on `by`, as both sides see it. */
static void talk_until_on(int fd, unsigned by)
{
    double end = seconds() + 30;
    char ours, theirs;
    do {
        CHECK(seconds() < end);
        ours = strcmp(way, "none") == 0 || runs_on(fd, by);
        if (!is_server)
            CHECK(put_all(fd, &ours, 1) == 1);
        CHECK(get_all(fd, &theirs, 1) == 1);
        if (is_server)
            CHECK(put_all(fd, &ours, 1) == 1);
        if (!(ours && theirs))
            pause_us(500);
    } while (!ours || !theirs);
}

static void warm(int fd)
{
    talk_until_on(fd, expected);
}

static void info(int fd)
{
    struct rdmasock_info info = info_of(fd), before;
    struct {
        struct rdmasock_info info;
        char more[8];
    } larger;
    CHECK(info.size == sizeof info && info.reserved == 0);
    if (expected == RDMASOCK_TCP) {
        unsigned why = is_server ? RDMASOCK_WHY_BELOW_THRESHOLD : RDMASOCK_WHY_RULE;
        CHECK(info.why == why && info.peer_why == RDMASOCK_WHY_NONE);
        CHECK(strcmp(info.why_text, is_server ? "below the promotion threshold" : "rule") == 0);
    } else {
        CHECK(info.why == RDMASOCK_WHY_NONE && info.why_text[0] == 0);
    }
    meet();
    before = info_of(fd);
    put(fd, 0, 5000);
    get(fd, 0, 5000);
    errno = 77;
    info = info_of(fd);
    CHECK(errno == 77);
    for (unsigned by = 0; by < RDMASOCK_WAYS; by++) {
        unsigned bytes = by == (unsigned)expected ? 5000 : 0;
        CHECK(info.sent[by] - before.sent[by] == bytes);
        CHECK(info.received[by] - before.received[by] == bytes);
    }
    CHECK(info.sent[RDMASOCK_TCP] > 0 && info.received[RDMASOCK_TCP] > 0);
    memset(&larger, 1, sizeof larger);
    larger.info.size = sizeof larger;
    CHECK(rdmasock_info(fd, &larger.info) == 0);
    CHECK(larger.info.size == sizeof info && memcmp(larger.more, "\0\0\0\0\0\0\0", 8) == 0);
    larger.info.size = sizeof info - 1;
    CHECK(rdmasock_info(fd, &larger.info) == -1 && errno == EINVAL);
    CHECK(rdmasock_info(fd, NULL) == -1 && errno == EFAULT);
}

static int error_of(int fd)
{
    struct rdmasock_info info;
    info.size = sizeof info;
    errno = 0;
    CHECK(rdmasock_info(fd, &info) == -1);
    return errno;
}

static void errors(int fd)
{
    struct sockaddr_in at;
    int others[2];
    CHECK(error_of(-1) == EBADF);
    CHECK(error_of(900) == EBADF);
    MUST(pipe(others));
    CHECK(error_of(others[0]) == ENOTSOCK);
    CHECK(error_of(MUST(epoll_create1(0))) == ENOTSOCK);
    CHECK(error_of(MUST(socket(AF_INET, SOCK_DGRAM, 0))) == EOPNOTSUPP);
    CHECK(error_of(MUST(socket(AF_UNIX, SOCK_STREAM, 0))) == EOPNOTSUPP);
    CHECK(error_of(MUST(socket(AF_INET, SOCK_STREAM, 0))) == ENOTCONN);
    CHECK(error_of(listening(&at)) == ENOTCONN);
    meet();
    close(fd);
    CHECK(error_of(fd) == EBADF);
}

/* TCP for good, asked for by one side, in the middle of data both ways. */
static void stay(int fd)
{
    struct rdmasock_info info;
    uint64_t at = 0;
    double end = seconds() + 30;
    meet();
    put(fd, 0, 30000);
    if (is_server) {
        errno = 77;
        CHECK(rdmasock_prefer(fd, RDMASOCK_TCP) == 0 && errno == 77);
        CHECK(rdmasock_prefer(fd, RDMASOCK_TCP) == 0);
        CHECK(rdmasock_prefer(fd, RDMASOCK_LINK) == -1 && errno == EOPNOTSUPP);
    }
    get(fd, 0, 30000);
    for (at = 30000;; at += 100) {
        put(fd, at, 100);
        get(fd, at, 100);
        char ours = runs_on(fd, RDMASOCK_TCP), theirs;
        CHECK(put_all(fd, &ours, 1) == 1 && get_all(fd, &theirs, 1) == 1);
        if (ours && theirs)
            break;
        CHECK(seconds() < end);
    }
    info = info_of(fd);
    if (is_server)
        CHECK(info.why == RDMASOCK_WHY_ASKED);
    else if (expected == RDMASOCK_SHM)
        CHECK(info.why == RDMASOCK_WHY_PEER_ASKED);
    /* For good. */
    for (int i = 0; i < 200; i++, at += 100) {
        put(fd, at + 100, 100);
        get(fd, at + 100, 100);
    }
    CHECK(runs_on(fd, RDMASOCK_TCP));
    CHECK(rdmasock_prefer(fd, 7) == -1 && errno == EINVAL);
    CHECK(rdmasock_prefer(-1, RDMASOCK_TCP) == -1 && errno == EBADF);
    CHECK(rdmasock_prefer(tells[0][0], RDMASOCK_TCP) == -1 && errno == ENOTSOCK);
    CHECK(rdmasock_prefer(MUST(socket(AF_INET, SOCK_DGRAM, 0)), RDMASOCK_TCP) == -1 && errno == EOPNOTSUPP);
}

static int listener;

/* Another connection; what is asked for is asked for before it is there. */
static int another(int of_listener, int before_connect)
{
    struct sockaddr_in at;
    socklen_t len = sizeof at;
    int fd, one = 1;
    if (is_server) {
        if (of_listener >= 0)
            CHECK(rdmasock_prefer(listener, of_listener) == 0);
        MUST(getsockname(listener, (struct sockaddr *)&at, &len));
        MUST(write(tells[1][1], &at, sizeof at));
        fd = MUST(accept(listener, NULL, NULL));
    } else {
        CHECK(read(tells[1][0], &at, sizeof at) == sizeof at);
        fd = MUST(socket(AF_INET, SOCK_STREAM, 0));
        if (before_connect >= 0)
            CHECK(rdmasock_prefer(fd, before_connect) == 0);
        MUST(connect(fd, (struct sockaddr *)&at, sizeof at));
    }
    MUST(setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one));
    return fd;
}

static void talk(int fd, int times)
{
    for (int i = 0; i < times; i++) {
        put(fd, i, 100);
        get(fd, i, 100);
    }
}

/* With a threshold that is never reached. */
static void hurry(int fd)
{
    int others[3];
    if (!is_server)
        CHECK(rdmasock_prefer(fd, RDMASOCK_LINK) == 0);
    talk_until_on(fd, expected);
    others[0] = another(-1, RDMASOCK_LINK);
    talk_until_on(others[0], expected);
    /* The other end stays, then this one. */
    others[1] = another(RDMASOCK_TCP, RDMASOCK_LINK);
    talk(others[1], 300);
    CHECK(runs_on(others[1], RDMASOCK_TCP));
    CHECK(!is_server || info_of(others[1]).why == RDMASOCK_WHY_ASKED);
    others[2] = another(RDMASOCK_LINK, RDMASOCK_TCP);
    talk(others[2], 300);
    CHECK(runs_on(others[2], RDMASOCK_TCP));
    CHECK(is_server || info_of(others[2]).why == RDMASOCK_WHY_ASKED);
    CHECK(is_server || rdmasock_prefer(others[2], RDMASOCK_LINK) == -1);
    CHECK(runs_on(others[0], expected) && runs_on(fd, expected));
    /* Nobody has asked. */
    others[2] = another(-1, -1);
    talk(others[2], 300);
    CHECK(info_of(others[2]).why == RDMASOCK_WHY_BELOW_THRESHOLD);
}

/* Without the library. */
static void absent(int fd)
{
    struct rdmasock_info info;
    info.size = sizeof info;
    for (int again = 0; again < 2; again++) {
        errno = 0;
        CHECK(rdmasock_info(fd, &info) == -1 && errno == ENOSYS);
        errno = 0;
        CHECK(rdmasock_prefer(fd, RDMASOCK_TCP) == -1 && errno == ENOSYS);
    }
}

static const struct {
    const char *name;
    void (*play)(int fd);
    int begins_cold;
} cases[] = {
    {"absent", absent, 0},
    {"info", info, 0},
    {"errors", errors, 0},
    {"stay", stay, 0},
    {"hurry", hurry, 1},
};

int main(int argc, char **argv)
{
    struct sockaddr_in at;
    CHECK(argc == 3);
    way = argv[2];
    expected = strcmp(way, "shm") == 0 ? RDMASOCK_SHM : strcmp(way, "rdma") == 0 ? RDMASOCK_RDMA : RDMASOCK_TCP;
    alarm(60);
    MUST(pipe2(tells[0], O_CLOEXEC));
    MUST(pipe2(tells[1], O_CLOEXEC));
    client = MUST(fork());
    is_server = client != 0;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        if (strcmp(cases[i].name, argv[1]) == 0) {
            int fd, one = 1, status;
            if (is_server) {
                listener = listening(&at);
                MUST(write(tells[1][1], &at, sizeof at));
                fd = MUST(accept4(listener, NULL, NULL, SOCK_CLOEXEC));
                MUST(setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one));
            } else {
                alarm(60);
                prctl(PR_SET_PDEATHSIG, SIGKILL);
                CHECK(read(tells[1][0], &at, sizeof at) == sizeof at);
                fd = connected(&at);
            }
            if (!cases[i].begins_cold)
                warm(fd);
            cases[i].play(fd);
            if (!is_server)
                exit(0);
            MUST(waitpid(client, &status, 0));
            CHECK(status == 0 || (WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL));
            exit(0);
        }
    }
    CHECK(!"such a case");
}
