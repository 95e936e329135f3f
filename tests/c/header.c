/* What include/rdmasock.h has: `header CASE WAY` plays a case between this process, which serves, and one that it forks
 * before there is any socket, which connects. WAY is what both directions come to run on: none (without the library),
 * tcp, shm or rdma. `header echo-client PORT` is the client of an echo server. It prints nothing, and ends well if all is as the header says. */
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

static unsigned state = 12345;

static unsigned any(unsigned below)
{
    state = state * 1103515245 + 12345;
    return (state >> 8) % below;
}

/* A view that is there, with its bytes as they should be from `at` on. Gives their number; 0 at the end. */
static size_t viewed(int fd, uint64_t at, struct iovec *pieces, int *count)
{
    *count = 2;
    errno = 77;
    ssize_t n = MUST(rdmasock_view(fd, pieces, count, 0));
    CHECK(errno == 77);
    size_t all = 0;
    for (int i = 0; i < *count; i++) {
        CHECK(pieces[i].iov_len > 0);
        check(pieces[i].iov_base, at + all, pieces[i].iov_len);
        all += pieces[i].iov_len;
    }
    CHECK(all == (size_t)n && *count <= 2 && (*count > 0 || n == 0));
    return n;
}

/* The same, once there are `len` bytes. */
static void view_of(int fd, uint64_t at, size_t len, struct iovec *pieces, int *count)
{
    double end = seconds() + 20;
    while (viewed(fd, at, pieces, count) != len)
        CHECK(seconds() < end);
}

static void check_pieces(const struct iovec *pieces, int count, uint64_t at)
{
    for (int i = 0; i < count; at += pieces[i++].iov_len)
        check(pieces[i].iov_base, at, pieces[i].iov_len);
}

/* All until the end of the stream: by view where that is possible, else by recv. Gives the bytes by view. */
static uint64_t take_all(int fd, uint64_t at, uint64_t until)
{
    static char buf[100000];
    uint64_t by_view = 0;
    for (;;) {
        struct iovec pieces[2];
        int count = 1 + any(2);
        ssize_t n = rdmasock_view(fd, pieces, &count, 0);
        if (n > 0) {
            check_pieces(pieces, count, at);
            size_t released = any(4) ? (size_t)n : any(n + 1);
            CHECK(rdmasock_release(fd, released) == 0);
            at += released;
            by_view += released;
            continue;
        }
        CHECK(n == 0 || errno == EOPNOTSUPP);
        n = MUST(recv(fd, buf, 1 + any(sizeof buf), 0));
        if (n == 0)
            break;
        check(buf, at, n);
        at += n;
    }
    CHECK(at == until);
    return by_view;
}

static void put_in_pieces(int fd, uint64_t at, uint64_t until)
{
    while (at < until) {
        size_t len = 1 + any(60000);
        if (len > until - at)
            len = until - at;
        put(fd, at, len);
        at += len;
    }
}

/* Much of it: across each end of the ring, and from one ring to a larger one. */
static void view(int fd)
{
    const uint64_t all = 8000000;
    if (is_server) {
        struct rdmasock_info before = info_of(fd), after;
        struct iovec pieces[2];
        int count, wraps = 0;
        uint64_t at = 0;
        while (expected != RDMASOCK_TCP && at < all / 2) {
            size_t n = viewed(fd, at, pieces, &count);
            /* A ring that is full reaches across its end, but for one that another is to follow. */
            for (int i = 0; wraps == 0 && at > 100000 && count < 2 && i < 20; i++) {
                pause_us(1000);
                n = viewed(fd, at, pieces, &count);
            }
            wraps += count == 2;
            while (n > 0) {
                size_t some = 1 + any(n);
                CHECK(rdmasock_release(fd, some) == 0);
                n -= some;
                at += some;
            }
            CHECK(rdmasock_release(fd, 1) == -1 && errno == EINVAL);
            CHECK(rdmasock_release(fd, 0) == 0);
        }
        CHECK(wraps > 0 || expected == RDMASOCK_TCP);
        uint64_t by_view = at + take_all(fd, at, all);
        after = info_of(fd);
        uint64_t received = 0;
        for (int by = 0; by < RDMASOCK_WAYS; by++)
            received += after.received[by] - before.received[by];
        CHECK(received == all);
        /* Between hosts a shutdown takes what is not received yet to TCP. */
        CHECK(by_view >= at && (expected != RDMASOCK_SHM || by_view == all));
        CHECK(after.received[expected] - before.received[expected] >= (by_view ? by_view : all));
    } else {
        put_in_pieces(fd, 0, all);
        MUST(shutdown(fd, SHUT_WR));
        hear();
        return;
    }
    /* What says the end goes on saying it. */
    struct iovec piece;
    int count = 1;
    ssize_t n = rdmasock_view(fd, &piece, &count, 0);
    CHECK(n == 0 && count == 0);
    tell();
}

/* The link fails, again and again: each byte comes once, by whatever way. */
static void view_cut(int fd)
{
    const uint64_t all = 8000000;
    if (is_server) {
        take_all(fd, 0, all);
        tell();
    } else {
        put_in_pieces(fd, 0, all);
        MUST(shutdown(fd, SHUT_WR));
        hear();
    }
}

/* The client of include/examples/echo.c. */
static void echo_client(int port)
{
    struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons(port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    int fd = connected(&to);
    for (uint64_t at = 0; at < 10000000;) {
        size_t len = 1 + any(60000);
        put(fd, at, len);
        get(fd, at, len);
        at += len;
    }
    close(fd);
}

static void on_alarm(int signal)
{
    (void)signal;
}

static void view_errors(int fd)
{
    struct iovec pieces[2];
    struct timeval little = {0, 50000}, forever = {0, 0};
    struct sigaction action, before;
    struct itimerval soon = {{0, 50000}, {0, 50000}}, never = {{0, 0}, {0, 0}};
    struct sockaddr_in at;
    int count = 2, others[2];
    meet();
    if (!is_server) {
        hear();
        return;
    }
    CHECK(rdmasock_release(fd, 0) == 0);
    CHECK(rdmasock_release(fd, 1) == -1 && errno == EINVAL);
    CHECK(rdmasock_view(fd, pieces, &count, MSG_PEEK) == -1 && errno == EINVAL);
    CHECK(rdmasock_view(fd, NULL, &count, 0) == -1 && errno == EFAULT);
    CHECK(rdmasock_view(fd, pieces, NULL, 0) == -1 && errno == EFAULT);
    count = 0;
    CHECK(rdmasock_view(fd, pieces, &count, 0) == -1 && errno == EINVAL);
    count = 2;
    CHECK(rdmasock_view(-1, pieces, &count, 0) == -1 && errno == EBADF);
    CHECK(rdmasock_release(-1, 0) == -1 && errno == EBADF);
    MUST(pipe(others));
    CHECK(rdmasock_view(others[0], pieces, &count, 0) == -1 && errno == ENOTSOCK);
    CHECK(rdmasock_release(others[0], 0) == -1 && errno == ENOTSOCK);
    CHECK(rdmasock_view(MUST(socket(AF_INET, SOCK_DGRAM, 0)), pieces, &count, 0) == -1 && errno == EOPNOTSUPP);
    CHECK(rdmasock_view(MUST(socket(AF_INET, SOCK_STREAM, 0)), pieces, &count, 0) == -1 && errno == ENOTCONN);
    CHECK(rdmasock_view(listening(&at), pieces, &count, 0) == -1 && errno == ENOTCONN);
    int none = expected == RDMASOCK_TCP ? EOPNOTSUPP : EAGAIN;
    CHECK(rdmasock_view(fd, pieces, &count, MSG_DONTWAIT) == -1 && errno == none);
    MUST(fcntl(fd, F_SETFL, O_NONBLOCK));
    CHECK(rdmasock_view(fd, pieces, &count, 0) == -1 && errno == none);
    MUST(fcntl(fd, F_SETFL, 0));
    MUST(setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &little, sizeof little));
    CHECK(rdmasock_view(fd, pieces, &count, 0) == -1 && errno == none);
    MUST(setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &forever, sizeof forever));
    memset(&action, 0, sizeof action);
    action.sa_handler = on_alarm;
    MUST(sigaction(SIGALRM, &action, &before));
    MUST(setitimer(ITIMER_REAL, &soon, NULL));
    CHECK(rdmasock_view(fd, pieces, &count, 0) == -1 && errno == (none == EAGAIN ? EINTR : none));
    MUST(setitimer(ITIMER_REAL, &never, NULL));
    MUST(sigaction(SIGALRM, &before, NULL));
    alarm(60);
    CHECK(count == 2);
    tell();
    /* The other end has gone. */
    CHECK(rdmasock_view(fd, pieces, &count, 0) == (none == EAGAIN ? 0 : -1) || none == EOPNOTSUPP || errno == EOPNOTSUPP);
}

/* Views and receives by turns. */
static void view_mixed(int fd)
{
    struct iovec pieces[2];
    int count;
    char byte;
    if (!is_server) {
        put(fd, 0, 1);
        hear();
        for (int at = 1; at < 1000; at += 111)
            put(fd, at, 111);
        hear();
        put(fd, 1000, 500);
        hear();
        return;
    }
    view_of(fd, 0, 1, pieces, &count);
    /* More, while nothing is released. */
    tell();
    view_of(fd, 0, 1000, pieces, &count);
    CHECK(recv(fd, &byte, 1, MSG_PEEK) == 1 && (unsigned char)byte == byte_at(0));
    CHECK(rdmasock_release(fd, 300) == 0);
    get(fd, 300, 200);
    CHECK(rdmasock_release(fd, 501) == -1 && errno == EINVAL);
    check_pieces(pieces, count, 0);
    CHECK(rdmasock_release(fd, 100) == 0);
    view_of(fd, 600, 400, pieces, &count);
    get(fd, 600, 400);
    CHECK(rdmasock_release(fd, 1) == -1 && errno == EINVAL);
    CHECK(rdmasock_view(fd, pieces, &count, MSG_DONTWAIT) == -1 && errno == EAGAIN);
    tell();
    view_of(fd, 1000, 500, pieces, &count);
    get(fd, 1000, 499);
    view_of(fd, 1499, 1, pieces, &count);
    CHECK(rdmasock_release(fd, 1) == 0);
    tell();
}

static void view_closed(int fd)
{
    struct iovec pieces[2];
    int count;
    char byte;
    if (!is_server) {
        put(fd, 0, 1000);
        CHECK(recv(fd, &byte, 1, 0) == -1 && errno == ECONNRESET);
    } else {
        view_of(fd, 0, 1000, pieces, &count);
        int copy = MUST(dup(fd));
        close(fd);
        CHECK(rdmasock_release(fd, 1) == -1 && errno == EBADF);
        check_pieces(pieces, count, 0);
        CHECK(rdmasock_release(copy, 1) == 0);
        close(copy);
    }
    /* The next ones have all that this one had. */
    for (int i = 0; i < 20; i++) {
        int next = another(-1, -1);
        warm(next);
        if (is_server) {
            view_of(next, 0, 3000, pieces, &count);
            if (i % 2)
                CHECK(rdmasock_release(next, 3000) == 0);
        } else {
            put(next, 0, 3000);
        }
        meet();
        close(next);
    }
}

static void view_killed(int fd)
{
    struct iovec pieces[2];
    int count;
    if (!is_server) {
        put(fd, 0, 2000);
        pause();
    }
    view_of(fd, 0, 2000, pieces, &count);
    kill(client, SIGKILL);
    pause_us(400000);
    check_pieces(pieces, count, 0);
    CHECK(rdmasock_release(fd, 500) == 0);
    view_of(fd, 500, 1500, pieces, &count);
    CHECK(rdmasock_release(fd, 1500) == 0);
    count = 2;
    ssize_t n = rdmasock_view(fd, pieces, &count, 0);
    CHECK(n == 0 || errno == ECONNRESET || errno == EOPNOTSUPP);
}

static void view_forked(int fd)
{
    struct iovec pieces[2];
    int count, status;
    if (!is_server) {
        put(fd, 0, 2000);
        hear();
        put(fd, 2000, 1000);
        hear();
        return;
    }
    view_of(fd, 0, 2000, pieces, &count);
    /* A child that does not use it. */
    pid_t child = MUST(fork());
    if (child == 0)
        _exit(close(fd));
    MUST(waitpid(child, &status, 0));
    CHECK(status == 0);
    check_pieces(pieces, count, 0);
    CHECK(rdmasock_release(fd, 500) == 0);
    view_of(fd, 500, 1500, pieces, &count);
    /* One that does: it has what is unread, and the view is over. */
    child = MUST(fork());
    if (child == 0) {
        CHECK(rdmasock_release(fd, 1) == -1 && errno == EINVAL);
        get(fd, 500, 700);
        _exit(0);
    }
    MUST(waitpid(child, &status, 0));
    CHECK(status == 0);
    check_pieces(pieces, count, 500);
    CHECK(rdmasock_release(fd, 1) == -1 && errno == ECANCELED);
    CHECK(rdmasock_release(fd, 1) == -1 && errno == EINVAL);
    get(fd, 1200, 800);
    tell();
    get(fd, 2000, 1000);
    tell();
}

/* To TCP while there is a view, by this end's wish, then by the other's. */
static void view_stays(int fd)
{
    struct iovec pieces[2];
    int count;
    for (int round = 0; round < 2; round++) {
        if (round == 1) {
            fd = another(-1, -1);
            warm(fd);
        }
        if (!is_server) {
            put(fd, 0, 2000);
            hear();
            if (round == 1)
                CHECK(rdmasock_prefer(fd, RDMASOCK_TCP) == 0);
            put(fd, 2000, 100000);
            MUST(shutdown(fd, SHUT_WR));
            hear();
            continue;
        }
        view_of(fd, 0, 2000, pieces, &count);
        if (round == 0)
            CHECK(rdmasock_prefer(fd, RDMASOCK_TCP) == 0);
        tell();
        pause_us(300000);
        check_pieces(pieces, count, 0);
        CHECK(rdmasock_release(fd, 700) == 0);
        check(pieces[count - 1].iov_base + pieces[count - 1].iov_len - 1, 1999, 1);
        take_all(fd, 700, 102000);
        CHECK(runs_on(fd, RDMASOCK_TCP));
        tell();
    }
}

/* The socket is passed on while there is a view. */
static void view_passed(int fd)
{
    struct iovec pieces[2];
    int count, pair[2];
    union {
        struct cmsghdr header;
        char room[CMSG_SPACE(sizeof(int))];
    } control;
    char byte = 0;
    struct iovec piece = {&byte, 1};
    struct msghdr message = {.msg_iov = &piece, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control};
    if (!is_server) {
        put(fd, 0, 2000);
        hear();
        put(fd, 2000, 1000);
        hear();
        return;
    }
    view_of(fd, 0, 2000, pieces, &count);
    CHECK(rdmasock_release(fd, 10) == 0);
    MUST(socketpair(AF_UNIX, SOCK_STREAM, 0, pair));
    control.header.cmsg_level = SOL_SOCKET;
    control.header.cmsg_type = SCM_RIGHTS;
    control.header.cmsg_len = CMSG_LEN(sizeof(int));
    memcpy(CMSG_DATA(&control.header), &fd, sizeof fd);
    CHECK(sendmsg(pair[0], &message, 0) == 1);
    tell();
    pause_us(100000);
    check_pieces(pieces, count, 0);
    CHECK(rdmasock_release(fd, 1) == -1 && errno == ECANCELED);
    CHECK(rdmasock_view(fd, pieces, &count, 0) == -1 && errno == EOPNOTSUPP);
    get(fd, 10, 2990);
    CHECK(info_of(fd).why == RDMASOCK_WHY_PASSED);
    tell();
}

/* Without the library. */
static void absent(int fd)
{
    struct rdmasock_info info;
    struct iovec piece;
    int count = 1;
    info.size = sizeof info;
    for (int again = 0; again < 2; again++) {
        errno = 0;
        CHECK(rdmasock_info(fd, &info) == -1 && errno == ENOSYS);
        errno = 0;
        CHECK(rdmasock_prefer(fd, RDMASOCK_TCP) == -1 && errno == ENOSYS);
        errno = 0;
        CHECK(rdmasock_view(fd, &piece, &count, 0) == -1 && errno == ENOSYS);
        errno = 0;
        CHECK(rdmasock_release(fd, 0) == -1 && errno == ENOSYS);
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
    {"view", view, 0},
    {"view_cut", view_cut, 0},
    {"view_errors", view_errors, 0},
    {"view_mixed", view_mixed, 0},
    {"view_closed", view_closed, 0},
    {"view_killed", view_killed, 0},
    {"view_forked", view_forked, 0},
    {"view_stays", view_stays, 0},
    {"view_passed", view_passed, 0},
};

int main(int argc, char **argv)
{
    struct sockaddr_in at;
    CHECK(argc == 3);
    way = argv[2];
    expected = strcmp(way, "shm") == 0 ? RDMASOCK_SHM : strcmp(way, "rdma") == 0 ? RDMASOCK_RDMA : RDMASOCK_TCP;
    alarm(60);
    if (strcmp(argv[1], "echo-client") == 0) {
        echo_client(atoi(argv[2]));
        return 0;
    }
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
