/* A stand-in for libibverbs.so.1 and librdmacm.so.1: what core/verbs calls, between processes of one machine and one
 * user, at memory's speed, without privileges or a kernel module. With it tests run the plugin itself. It trusts its
 * peers, and it checks its user: keys, access rights, queue lengths, receive buffers.
 *
 *   connection   an event channel's fd is a SEQPACKET socket; a listener's has an abstract name by address and port
 *   queue pair   both ends map one System V segment: an inbox for each, with SENDs and immediates
 *   WRITE, READ  process_vm_writev(2) and process_vm_readv(2), if the peer's table has the key
 *   table        a file DIRECTORY/PID, mapped by the process and its peers: registrations, and counters for tests
 *   completions  a channel's fd is a datagram socket with an abstract name, to which either process sends a byte
 *
 * DIRECTORY is where this library is. VERBS_STANDIN is a list of words: `iwarp`, else as RoCE; `memlock`, to refuse what
 * exceeds RLIMIT_MEMLOCK, for root too; `cut=N`, each queue pair fails after N work requests. System calls are made
 * directly: the preloaded library hooks libc's. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <infiniband/verbs.h>
#include <pthread.h>
#include <rdma/rdma_cma.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ipc.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/shm.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <unistd.h>

#undef ibv_query_qp
#undef ibv_reg_mr

/* SLOT: the plugin's longest message. SLOTS: more than the plugin posts receive buffers. */
enum { REGIONS = 4096, SLOTS = 256, SLOT = 4096 + 64, PRIVATE = 56, HIGH = 1000 };

/* ---- system calls ---- */

static long call(long number, long a, long b, long c, long d, long e, long f)
{
    long result;
    register long r10 __asm__("r10") = d, r8 __asm__("r8") = e, r9 __asm__("r9") = f;
    __asm__ volatile("syscall"
                     : "=a"(result)
                     : "a"(number), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8), "r"(r9)
                     : "rcx", "r11", "memory");
    return result;
}
#define CALL_(n, a, b, c, d, e, f, ...) call(n, (long)(a), (long)(b), (long)(c), (long)(d), (long)(e), (long)(f))
#define CALL(...) CALL_(__VA_ARGS__, 0, 0, 0, 0, 0, 0, 0)

/* As libc gives a system call's result. */
static int result(long value)
{
    if (value >= 0)
        return value;
    errno = -value;
    return -1;
}

static void *mapped(long value) { return value < 0 && value > -4096 ? NULL : (void *)value; }

/* ---- the device ---- */

/* Memory that is registered; key 0: none. `users` are in it, so nobody reaches it after it was deregistered. */
struct region {
    _Atomic uint32_t key, users;
    uint32_t access, unused;
    uint64_t start, len;
};

/* What tests read: the counters come first. */
struct table {
    _Atomic int64_t pinned, registered, queue_pairs, refused;
    struct region regions[REGIONS];
};

static struct ibv_device device = {.node_type = IBV_NODE_CA, .transport_type = IBV_TRANSPORT_IB, .name = "standin0"};
static struct ibv_context *context;
static struct table *own;
static char directory[4096];
static bool is_iwarp, is_limited;
static int64_t cut;
/* Guards the device, lists of completion queues, and queues of events. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

__attribute__((constructor)) static void configure(void)
{
    Dl_info info;
    const char *words = getenv("VERBS_STANDIN") ?: "", *found;
    if (dladdr(configure, &info))
        snprintf(directory, sizeof directory, "%.*s", (int)(strrchr(info.dli_fname, '/') - info.dli_fname), info.dli_fname);
    is_iwarp = strstr(words, "iwarp");
    is_limited = strstr(words, "memlock");
    cut = (found = strstr(words, "cut=")) ? atol(found + 4) : 0;
    if (is_iwarp)
        device.node_type = IBV_NODE_RNIC, device.transport_type = IBV_TRANSPORT_IWARP;
}

/* The table of a process; makes that of this one. */
static struct table *map_table(pid_t pid, bool makes)
{
    char path[sizeof directory + 16];
    snprintf(path, sizeof path, "%s/%d", directory, pid);
    if (makes)
        CALL(SYS_unlink, path);
    int fd = CALL(SYS_open, path, O_RDWR | O_CLOEXEC | (makes ? O_CREAT | O_EXCL : 0), 0600);
    if (fd < 0 || (makes && CALL(SYS_ftruncate, fd, sizeof(struct table)) < 0))
        return NULL;
    struct table *table = mapped(CALL(SYS_mmap, 0, sizeof *table, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0));
    CALL(SYS_close, fd);
    if (table)
        CALL(SYS_madvise, table, sizeof *table, MADV_DONTFORK);
    return table;
}

/* Accounts for memory that a device keeps pinned; ENOMEM where RLIMIT_MEMLOCK is to be respected, and is exceeded. */
static bool pin(int64_t bytes)
{
    struct rlimit limit = {0};
    int64_t now = own->pinned += bytes;
    CALL(SYS_prlimit64, 0, RLIMIT_MEMLOCK, 0, &limit);
    if (is_limited && bytes > 0 && (rlim_t)now > limit.rlim_cur) {
        own->pinned -= bytes;
        own->refused++;
        errno = ENOMEM;
        return false;
    }
    return true;
}

/* Holds what a key stands for, if these bytes are in it and may be accessed so. */
static struct region *reach(struct table *table, uint32_t key, uint64_t at, uint64_t len, uint32_t access)
{
    struct region *region = &table->regions[key % REGIONS];
    region->users++;
    if (key && region->key == key && at >= region->start && at - region->start <= region->len &&
        len <= region->len - (at - region->start) && (region->access & access) == access)
        return region;
    region->users--;
    return NULL;
}

/* ---- completion queues and queue pairs ---- */

struct slot {
    uint32_t bytes, immediate, has_immediate, unused;
    char data[SLOT];
};

/* One end of a queue pair, as both processes have it: its inbox, and how its owner is woken. */
struct end {
    pid_t pid;
    uint32_t channel;
    _Atomic uint32_t armed, fired, gone;
    _Alignas(64) _Atomic uint32_t tail;
    _Alignas(64) _Atomic uint32_t head;
    struct slot slots[SLOTS];
};

struct channel {
    struct ibv_comp_channel base;
    uint32_t number;
    struct cq *first;
};

struct done {
    struct ibv_wc wc;
    uint32_t request;
};

/* A completion queue; it serves one queue pair. `lock` guards what is in it, and the receive queue. */
struct cq {
    struct ibv_cq base;
    struct cq *next;
    struct qp *qp;
    pthread_mutex_t lock;
    _Atomic uint32_t taken;
    uint32_t size, head, tail;
    struct done done[];
};

/* A receive buffer. */
struct receive {
    uint64_t id, at, len;
};

/* A queue pair. `sending` guards the send queue. */
struct qp {
    struct ibv_qp base;
    struct end *ends;
    struct table *theirs;
    int me;
    pthread_mutex_t sending;
    _Atomic bool failed;
    uint32_t sends, posted, receives, receive_head, receive_tail;
    _Atomic uint32_t freed;
    int64_t cost;
    struct receive receive[];
};

struct mr {
    struct ibv_mr base;
    struct region *region;
    int64_t cost;
};

/* Completion channels have numbers from 1 on; 0 is for the device's own events. */
static socklen_t channel_name(struct sockaddr_un *at, pid_t pid, uint32_t number)
{
    *at = (struct sockaddr_un){.sun_family = AF_UNIX};
    int len = snprintf(at->sun_path + 1, sizeof at->sun_path - 1, "verbs-standin-%d-%u", pid, number);
    return offsetof(struct sockaddr_un, sun_path) + 1 + len;
}

static void send_to(int from, pid_t pid, uint32_t number, const void *data, size_t bytes)
{
    struct sockaddr_un at;
    socklen_t len = channel_name(&at, pid, number);
    CALL(SYS_sendto, from, data, bytes, MSG_DONTWAIT | MSG_NOSIGNAL, &at, len);
}

/* A socket with the name of a channel of this process; a negative errno. */
static int open_channel(uint32_t number)
{
    struct sockaddr_un at;
    socklen_t len = channel_name(&at, CALL(SYS_getpid), number);
    int fd = CALL(SYS_socket, AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    long bound = fd < 0 ? fd : CALL(SYS_bind, fd, &at, len);
    if (fd >= 0 && bound < 0)
        CALL(SYS_close, fd);
    return bound < 0 ? bound : fd;
}

/* Something is in the completion queue of an end: tells its owner, if it has asked for that. */
static void wake(struct qp *qp, struct end *end)
{
    if (!atomic_exchange(&end->armed, 0))
        return;
    end->fired = 1;
    send_to(qp->base.recv_cq->channel->fd, end->pid, end->channel, "", 1);
}

static void complete(struct qp *qp, uint64_t id, int status, int opcode)
{
    struct cq *cq = (struct cq *)qp->base.send_cq;
    pthread_mutex_lock(&cq->lock);
    if (cq->tail - cq->head < cq->size) {
        struct ibv_wc wc = {.wr_id = id, .status = status, .opcode = opcode, .qp_num = qp->base.qp_num};
        cq->done[cq->tail++ % cq->size] = (struct done){wc, qp->posted};
    } else {
        /* An overrun, which no queue pair survives. */
        qp->failed = true;
    }
    pthread_mutex_unlock(&cq->lock);
    wake(qp, &qp->ends[qp->me]);
}

static int deliver(struct qp *qp, const void *data, uint32_t len, const uint32_t *immediate)
{
    struct end *to = &qp->ends[!qp->me];
    uint32_t tail = to->tail;
    if (to->gone)
        return IBV_WC_RETRY_EXC_ERR;
    if (tail - to->head >= SLOTS)
        return IBV_WC_RNR_RETRY_EXC_ERR;
    if (!immediate && len > SLOT)
        return IBV_WC_REM_INV_REQ_ERR;
    struct slot *slot = &to->slots[tail % SLOTS];
    slot->bytes = len;
    slot->has_immediate = immediate != NULL;
    slot->immediate = immediate ? *immediate : 0;
    if (!immediate)
        memcpy(slot->data, data, len);
    to->tail = tail + 1;
    wake(qp, to);
    return IBV_WC_SUCCESS;
}

/* A WRITE or READ of what lies at `piece`. */
static int transfer(struct qp *qp, const struct ibv_send_wr *wr, const struct ibv_sge *piece)
{
    struct iovec here = {(void *)piece->addr, piece->length}, there = {(void *)wr->wr.rdma.remote_addr, piece->length};
    bool reads = wr->opcode == IBV_WR_RDMA_READ;
    int access = reads ? IBV_ACCESS_REMOTE_READ : IBV_ACCESS_REMOTE_WRITE;
    struct region *region = reach(qp->theirs, wr->wr.rdma.rkey, wr->wr.rdma.remote_addr, piece->length, access);
    if (!region)
        return IBV_WC_REM_ACCESS_ERR;
    long moved = CALL(reads ? SYS_process_vm_readv : SYS_process_vm_writev, qp->ends[!qp->me].pid, &here, 1, &there, 1);
    region->users--;
    return moved == (long)piece->length ? IBV_WC_SUCCESS : IBV_WC_RETRY_EXC_ERR;
}

static int carry_out(struct qp *qp, const struct ibv_send_wr *wr)
{
    static const struct ibv_sge nothing;
    const struct ibv_sge *piece = wr->num_sge ? wr->sg_list : &nothing;
    bool has_immediate = wr->opcode == IBV_WR_RDMA_WRITE_WITH_IMM;
    struct region *region = NULL;
    int access = 0, status = IBV_WC_SUCCESS;
    if (qp->failed)
        return IBV_WC_WR_FLUSH_ERR;
    if (cut && qp->posted > cut) {
        struct ibv_async_event event = {.element.qp = &qp->base, .event_type = IBV_EVENT_QP_FATAL};
        send_to(qp->base.context->async_fd, qp->ends[qp->me].pid, 0, &event, sizeof event);
        return IBV_WC_RETRY_EXC_ERR;
    }
    /* On iWARP who accepts speaks second, there are no immediates, and the answer to a READ is the peer's WRITE. */
    if (!qp->theirs || (is_iwarp && (has_immediate || (qp->me && !qp->ends[1].head))))
        return IBV_WC_LOC_QP_OP_ERR;
    if (wr->opcode == IBV_WR_RDMA_READ)
        access = IBV_ACCESS_LOCAL_WRITE | (is_iwarp ? IBV_ACCESS_REMOTE_WRITE : 0);
    if (piece->length && !(wr->send_flags & IBV_SEND_INLINE)) {
        region = reach(own, piece->lkey, piece->addr, piece->length, access);
        if (!region)
            return IBV_WC_LOC_PROT_ERR;
    }
    if (wr->opcode == IBV_WR_SEND)
        status = deliver(qp, (void *)piece->addr, piece->length, NULL);
    else if (qp->ends[!qp->me].gone)
        status = IBV_WC_RETRY_EXC_ERR;
    else if (piece->length)
        status = transfer(qp, wr, piece);
    if (has_immediate && status == IBV_WC_SUCCESS)
        status = deliver(qp, NULL, piece->length, &wr->imm_data);
    if (region)
        region->users--;
    return status;
}

static int post_send(struct ibv_qp *base, struct ibv_send_wr *wr, struct ibv_send_wr **bad)
{
    struct qp *qp = (struct qp *)base;
    int errors = 0;
    pthread_mutex_lock(&qp->sending);
    for (; wr && !errors; wr = wr->next) {
        if (qp->posted - qp->freed >= qp->sends) {
            *bad = wr;
            errors = ENOMEM;
            break;
        }
        qp->posted++;
        int status = carry_out(qp, wr);
        if (status != IBV_WC_SUCCESS)
            qp->failed = true;
        if (status != IBV_WC_SUCCESS || wr->send_flags & IBV_SEND_SIGNALED)
            complete(qp, wr->wr_id, status, wr->opcode == IBV_WR_RDMA_READ ? IBV_WC_RDMA_READ : IBV_WC_SEND);
    }
    pthread_mutex_unlock(&qp->sending);
    return errors;
}

static int post_recv(struct ibv_qp *base, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad)
{
    struct qp *qp = (struct qp *)base;
    struct cq *cq = (struct cq *)base->recv_cq;
    int errors = 0;
    pthread_mutex_lock(&cq->lock);
    for (; wr && !errors; wr = wr->next) {
        const struct ibv_sge *piece = wr->sg_list;
        struct region *region = reach(own, piece->lkey, piece->addr, piece->length, IBV_ACCESS_LOCAL_WRITE);
        if (!region || qp->receive_tail - qp->receive_head >= qp->receives) {
            *bad = wr;
            errors = region ? ENOMEM : EINVAL;
        } else {
            qp->receive[qp->receive_tail++ % qp->receives] = (struct receive){wr->wr_id, piece->addr, piece->length};
        }
        if (region)
            region->users--;
    }
    pthread_mutex_unlock(&cq->lock);
    return errors;
}

/* What has completed of the receive queue: what is in the inbox, and after a failure the rest of the buffers. */
static bool received(struct qp *qp, struct ibv_wc *wc)
{
    struct end *end = &qp->ends[qp->me];
    bool has_come = end->head != end->tail;
    if (qp->receive_head == qp->receive_tail || (!has_come && !qp->failed))
        return false;
    struct receive *receive = &qp->receive[qp->receive_head++ % qp->receives];
    struct slot *slot = &end->slots[end->head % SLOTS];
    *wc = (struct ibv_wc){.wr_id = receive->id, .status = IBV_WC_WR_FLUSH_ERR, .opcode = IBV_WC_RECV};
    if (!has_come)
        return true;
    wc->status = IBV_WC_SUCCESS;
    wc->byte_len = slot->bytes;
    wc->imm_data = slot->immediate;
    if (slot->has_immediate)
        wc->opcode = IBV_WC_RECV_RDMA_WITH_IMM;
    else if (slot->bytes > receive->len)
        wc->status = IBV_WC_LOC_LEN_ERR;
    else
        memcpy((void *)receive->at, slot->data, slot->bytes);
    end->head++;
    return true;
}

static int poll_cq(struct ibv_cq *base, int n, struct ibv_wc *wc)
{
    struct cq *cq = (struct cq *)base;
    int got = 0;
    pthread_mutex_lock(&cq->lock);
    for (; got < n && cq->head != cq->tail; got++) {
        struct done *done = &cq->done[cq->head++ % cq->size];
        wc[got] = done->wc;
        if (cq->qp)
            cq->qp->freed = done->request;
    }
    while (got < n && cq->qp && received(cq->qp, &wc[got]))
        got++;
    pthread_mutex_unlock(&cq->lock);
    return got;
}

static int req_notify(struct ibv_cq *base, int solicited)
{
    struct cq *cq = (struct cq *)base;
    (void)solicited;
    pthread_mutex_lock(&cq->lock);
    if (cq->qp)
        cq->qp->ends[cq->qp->me].armed = 1;
    pthread_mutex_unlock(&cq->lock);
    return 0;
}

/* The one device, which is opened once; NULL and errno if it cannot be. */
static struct ibv_context *open_device(void)
{
    pthread_mutex_lock(&lock);
    if (!context && (own = map_table(CALL(SYS_getpid), true))) {
        context = calloc(1, sizeof *context);
        context->device = &device;
        context->num_comp_vectors = 1;
        context->cmd_fd = CALL(SYS_open, "/dev/null", O_RDWR | O_CLOEXEC);
        context->async_fd = open_channel(0);
        context->ops.post_send = post_send;
        context->ops.post_recv = post_recv;
        context->ops.poll_cq = poll_cq;
        context->ops.req_notify_cq = req_notify;
    }
    pthread_mutex_unlock(&lock);
    if (!context)
        errno = ENOMEM;
    return context;
}

int ibv_fork_init(void) { return 0; }

int ibv_query_device(struct ibv_context *of, struct ibv_device_attr *attr)
{
    (void)of;
    *attr = (struct ibv_device_attr){.max_qp_wr = 16384, .max_cqe = 1 << 20, .max_qp_rd_atom = 16, .max_qp_init_rd_atom = 16};
    return 0;
}

int ibv_get_async_event(struct ibv_context *of, struct ibv_async_event *event)
{
    return result(CALL(SYS_recvfrom, of->async_fd, event, sizeof *event, MSG_DONTWAIT)) < 0 ? -1 : 0;
}

void ibv_ack_async_event(struct ibv_async_event *event) { (void)event; }

struct ibv_pd *ibv_alloc_pd(struct ibv_context *of)
{
    struct ibv_pd *pd = calloc(1, sizeof *pd);
    pd->context = of;
    return pd;
}

int ibv_dealloc_pd(struct ibv_pd *pd)
{
    free(pd);
    return 0;
}

struct ibv_mr *ibv_reg_mr(struct ibv_pd *pd, void *at, size_t len, int access)
{
    static uint32_t turn;
    uint64_t first = (uint64_t)at & ~4095UL, end = ((uint64_t)at + len + 4095) & ~4095UL;
    int populate = access & (IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE) ? MADV_POPULATE_WRITE : MADV_POPULATE_READ;
    struct region *region = NULL;
    struct mr *mr;
    if (!pin(end - first))
        return NULL;
    /* As a device does: the pages are there from now on, or it is an error. */
    if (CALL(SYS_madvise, first, end - first, populate) < 0) {
        pin(first - end);
        errno = EFAULT;
        return NULL;
    }
    pthread_mutex_lock(&lock);
    for (int tries = 0; !region && tries < REGIONS; tries++) {
        region = &own->regions[++turn % REGIONS];
        if (turn == 0 || region->key || region->users)
            region = NULL;
    }
    if (region) {
        region->start = (uint64_t)at;
        region->len = len;
        region->access = access;
        region->key = turn;
        own->registered++;
    }
    pthread_mutex_unlock(&lock);
    if (!region || !(mr = calloc(1, sizeof *mr))) {
        pin(first - end);
        errno = ENOMEM;
        return NULL;
    }
    mr->base = (struct ibv_mr){.context = pd->context, .pd = pd, .addr = at, .length = len};
    mr->base.lkey = mr->base.rkey = region->key;
    mr->region = region;
    mr->cost = end - first;
    return &mr->base;
}

int ibv_dereg_mr(struct ibv_mr *base)
{
    struct mr *mr = (struct mr *)base;
    mr->region->key = 0;
    /* Whoever is in it leaves soon, or has died in it: then the entry is never used again. */
    for (int turns = 0; mr->region->users && turns < 1000000; turns++)
        CALL(SYS_sched_yield);
    own->registered--;
    pin(-mr->cost);
    free(mr);
    return 0;
}

struct ibv_comp_channel *ibv_create_comp_channel(struct ibv_context *of)
{
    static _Atomic uint32_t last;
    uint32_t number = ++last;
    int fd = result(open_channel(number));
    if (fd < 0)
        return NULL;
    struct channel *channel = calloc(1, sizeof *channel);
    *channel = (struct channel){.base = {.context = of, .fd = fd}, .number = number};
    return &channel->base;
}

int ibv_destroy_comp_channel(struct ibv_comp_channel *channel)
{
    if (channel->fd >= 0)
        CALL(SYS_close, channel->fd);
    free(channel);
    return 0;
}

struct ibv_cq *ibv_create_cq(struct ibv_context *of, int n, void *user, struct ibv_comp_channel *base, int vector)
{
    struct channel *channel = (struct channel *)base;
    struct cq *cq = calloc(1, sizeof *cq + n * sizeof(struct done));
    (void)vector;
    cq->base = (struct ibv_cq){.context = of, .channel = base, .cq_context = user, .cqe = n};
    cq->size = n;
    pthread_mutex_init(&cq->lock, NULL);
    if (!pin(n * 64)) {
        free(cq);
        return NULL;
    }
    pthread_mutex_lock(&lock);
    cq->next = channel->first;
    channel->first = cq;
    pthread_mutex_unlock(&lock);
    return &cq->base;
}

int ibv_destroy_cq(struct ibv_cq *base)
{
    struct cq *cq = (struct cq *)base, **at;
    if (cq->qp)
        return EBUSY;
    pthread_mutex_lock(&lock);
    for (at = &((struct channel *)base->channel)->first; *at != cq; at = &(*at)->next)
        ;
    *at = cq->next;
    pthread_mutex_unlock(&lock);
    while (cq->taken)
        CALL(SYS_sched_yield);
    pin(-64 * (int64_t)cq->size);
    free(cq);
    return 0;
}

int ibv_get_cq_event(struct ibv_comp_channel *base, struct ibv_cq **found, void **user)
{
    char byte;
    for (;;) {
        long got = CALL(SYS_recvfrom, base->fd, &byte, 1, MSG_DONTWAIT);
        struct cq *cq;
        pthread_mutex_lock(&lock);
        for (cq = ((struct channel *)base)->first; cq; cq = cq->next)
            if (cq->qp && atomic_exchange(&cq->qp->ends[cq->qp->me].fired, 0))
                break;
        if (cq)
            cq->taken++;
        pthread_mutex_unlock(&lock);
        if (cq) {
            *found = &cq->base;
            *user = cq->base.cq_context;
            return 0;
        }
        if (got < 0)
            return result(got);
    }
}

void ibv_ack_cq_events(struct ibv_cq *cq, unsigned n)
{
    ((struct cq *)cq)->taken -= n;
}

int ibv_query_qp(struct ibv_qp *qp, struct ibv_qp_attr *attr, int mask, struct ibv_qp_init_attr *init)
{
    (void)qp, (void)mask, (void)init;
    attr->path_mtu = IBV_MTU_1024;
    return 0;
}

/* ---- the connection manager ---- */

enum kind { REQUEST = 1, REPLY, READY, REJECT, GOODBYE };

struct word {
    enum kind kind;
    pid_t pid;
    int segment;
    uint32_t len;
    char private[PRIVATE];
};

struct event {
    struct rdma_cm_event base;
    struct event *next;
    char private[PRIVATE];
};

struct id {
    struct rdma_cm_id base;
    int socket; /* of a request that has no channel of its own yet; else -1 */
    int segment;
    pid_t peer;
    bool is_request, listens, is_up, is_over;
};

struct cm_channel {
    struct rdma_event_channel base;
    struct id *id;
    struct event *first;
};

static int socket_of(struct id *id) { return id->socket >= 0 ? id->socket : id->base.channel->fd; }

static void push(struct id *id, int kind, int status, const struct word *word, struct rdma_event_channel *to)
{
    struct event *event = calloc(1, sizeof *event), **at;
    event->base = (struct rdma_cm_event){.id = &id->base, .event = kind, .status = status};
    if (word) {
        memcpy(event->private, word->private, PRIVATE);
        event->base.param.conn.private_data = event->private;
        event->base.param.conn.private_data_len = word->len;
    }
    pthread_mutex_lock(&lock);
    for (at = &((struct cm_channel *)to)->first; *at; at = &(*at)->next)
        ;
    *at = event;
    pthread_mutex_unlock(&lock);
}

static int say(struct id *id, enum kind kind, const struct rdma_conn_param *param)
{
    struct word word = {.kind = kind, .pid = CALL(SYS_getpid), .segment = id->segment};
    if (param)
        memcpy(word.private, param->private_data, word.len = param->private_data_len);
    return result(CALL(SYS_sendto, socket_of(id), &word, sizeof word, MSG_DONTWAIT | MSG_NOSIGNAL)) < 0 ? -1 : 0;
}

struct rdma_event_channel *rdma_create_event_channel(void)
{
    struct cm_channel *channel = calloc(1, sizeof *channel);
    channel->base.fd = result(CALL(SYS_socket, AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
    if (channel->base.fd >= 0)
        return &channel->base;
    free(channel);
    return NULL;
}

void rdma_destroy_event_channel(struct rdma_event_channel *channel)
{
    if (channel->fd >= 0)
        CALL(SYS_close, channel->fd);
    free(channel);
}

int rdma_create_id(struct rdma_event_channel *channel, struct rdma_cm_id **made, void *user, enum rdma_port_space space)
{
    struct id *id = calloc(1, sizeof *id);
    id->base = (struct rdma_cm_id){.channel = channel, .context = user, .ps = space};
    id->socket = id->segment = -1;
    ((struct cm_channel *)channel)->id = id;
    *made = &id->base;
    return 0;
}

int rdma_destroy_id(struct rdma_cm_id *base)
{
    struct id *id = (struct id *)base;
    struct cm_channel *channel = (struct cm_channel *)base->channel;
    pthread_mutex_lock(&lock);
    for (struct event **at = &channel->first, *event; (event = *at);)
        if (event->base.id == base)
            *at = event->next, free(event);
        else
            at = &event->next;
    pthread_mutex_unlock(&lock);
    if (channel->id == id)
        channel->id = NULL;
    if (id->socket >= 0)
        CALL(SYS_close, id->socket);
    free(id);
    return 0;
}

int rdma_migrate_id(struct rdma_cm_id *base, struct rdma_event_channel *channel)
{
    struct id *id = (struct id *)base;
    if (result(CALL(SYS_dup3, id->socket, channel->fd, O_CLOEXEC)) < 0)
        return -1;
    CALL(SYS_close, id->socket);
    id->socket = -1;
    base->channel = channel;
    ((struct cm_channel *)channel)->id = id;
    return 0;
}

/* The abstract name of a listener. */
static socklen_t listener_name(struct sockaddr_un *at, const struct sockaddr_storage *address)
{
    const struct sockaddr_in *v4 = (void *)address;
    const struct sockaddr_in6 *v6 = (void *)address;
    char ip[INET6_ADDRSTRLEN];
    bool is_v6 = address->ss_family == AF_INET6;
    inet_ntop(address->ss_family, is_v6 ? (void *)&v6->sin6_addr : (void *)&v4->sin_addr, ip, sizeof ip);
    *at = (struct sockaddr_un){.sun_family = AF_UNIX};
    int len = snprintf(at->sun_path + 1, sizeof at->sun_path - 1, "verbs-standin-%s-%d", ip, ntohs(v4->sin_port));
    return offsetof(struct sockaddr_un, sun_path) + 1 + len;
}

int rdma_bind_addr(struct rdma_cm_id *id, struct sockaddr *at)
{
    memcpy(&id->route.addr.src_storage, at, sizeof(struct sockaddr_in6));
    id->verbs = open_device();
    return id->verbs ? 0 : -1;
}

int rdma_listen(struct rdma_cm_id *base, int backlog)
{
    static _Atomic uint16_t last;
    struct sockaddr_in *address = &base->route.addr.src_sin;
    bool any = !address->sin_port;
    struct sockaddr_un at;
    long bound;
    do {
        if (any)
            address->sin_port = htons(20000 + (CALL(SYS_getpid) * 7 + ++last) % 40000);
        socklen_t len = listener_name(&at, &base->route.addr.src_storage);
        bound = CALL(SYS_bind, base->channel->fd, &at, len);
    } while (any && bound == -EADDRINUSE);
    ((struct id *)base)->listens = true;
    return result(bound < 0 ? bound : CALL(SYS_listen, base->channel->fd, backlog));
}

__be16 rdma_get_src_port(struct rdma_cm_id *id) { return id->route.addr.src_sin.sin_port; }

int rdma_resolve_addr(struct rdma_cm_id *id, struct sockaddr *from, struct sockaddr *to, int timeout)
{
    (void)timeout;
    memcpy(&id->route.addr.dst_storage, to, sizeof(struct sockaddr_in6));
    if (rdma_bind_addr(id, from) < 0)
        return -1;
    push((struct id *)id, RDMA_CM_EVENT_ADDR_RESOLVED, 0, NULL, id->channel);
    return 0;
}

int rdma_resolve_route(struct rdma_cm_id *id, int timeout)
{
    (void)timeout;
    push((struct id *)id, RDMA_CM_EVENT_ROUTE_RESOLVED, 0, NULL, id->channel);
    return 0;
}

int rdma_set_option(struct rdma_cm_id *id, int level, int name, void *value, size_t len)
{
    (void)id, (void)level, (void)name, (void)value, (void)len;
    return 0;
}

int rdma_create_qp(struct rdma_cm_id *base, struct ibv_pd *pd, struct ibv_qp_init_attr *attr)
{
    static _Atomic uint32_t last;
    struct id *id = (struct id *)base;
    struct cq *cq = (struct cq *)attr->recv_cq;
    uint32_t receives = attr->cap.max_recv_wr;
    if (attr->cap.max_inline_data > (is_iwarp ? 80 : 256) || cq->qp || attr->send_cq != attr->recv_cq) {
        errno = EINVAL;
        return -1;
    }
    int64_t cost = (attr->cap.max_send_wr * (64 + attr->cap.max_inline_data) + receives * 16 + 4095) & ~4095UL;
    struct qp *qp = calloc(1, sizeof *qp + receives * sizeof *qp->receive);
    if (!qp || !pin(cost)) {
        free(qp);
        return -1;
    }
    if (!id->is_request)
        id->segment = CALL(SYS_shmget, IPC_PRIVATE, 2 * sizeof *qp->ends, IPC_CREAT | 0600);
    qp->ends = mapped(CALL(SYS_shmat, id->segment, 0, 0));
    if (!id->is_request)
        CALL(SYS_shmctl, id->segment, IPC_RMID, 0);
    if (!qp->ends) {
        pin(-cost);
        free(qp);
        errno = ENOMEM;
        return -1;
    }
    CALL(SYS_madvise, qp->ends, 2 * sizeof *qp->ends, MADV_DONTFORK);
    qp->base = (struct ibv_qp){.context = base->verbs, .pd = pd, .send_cq = attr->send_cq, .recv_cq = attr->recv_cq};
    qp->base.qp_num = ++last;
    qp->me = id->is_request;
    qp->sends = attr->cap.max_send_wr;
    qp->receives = receives;
    qp->cost = cost;
    qp->ends[qp->me].pid = CALL(SYS_getpid);
    qp->ends[qp->me].channel = ((struct channel *)attr->recv_cq->channel)->number;
    pthread_mutex_init(&qp->sending, NULL);
    pthread_mutex_lock(&lock);
    cq->qp = qp;
    pthread_mutex_unlock(&lock);
    own->queue_pairs++;
    base->qp = &qp->base;
    return 0;
}

void rdma_destroy_qp(struct rdma_cm_id *base)
{
    struct qp *qp = (struct qp *)base->qp;
    struct cq *cq = (struct cq *)qp->base.recv_cq;
    qp->ends[qp->me].gone = 1;
    pthread_mutex_lock(&lock);
    pthread_mutex_lock(&cq->lock);
    cq->qp = NULL;
    pthread_mutex_unlock(&cq->lock);
    pthread_mutex_unlock(&lock);
    if (qp->theirs)
        CALL(SYS_munmap, qp->theirs, sizeof *qp->theirs);
    CALL(SYS_shmdt, qp->ends);
    own->queue_pairs--;
    pin(-qp->cost);
    base->qp = NULL;
    free(qp);
}

/* The peer of a queue pair is known. */
static int join(struct id *id, pid_t peer)
{
    struct qp *qp = (struct qp *)id->base.qp;
    qp->theirs = map_table(peer, false);
    if (!qp->theirs)
        errno = ECONNRESET;
    return qp->theirs ? 0 : -1;
}

int rdma_connect(struct rdma_cm_id *base, struct rdma_conn_param *param)
{
    struct sockaddr_un at;
    socklen_t len = listener_name(&at, &base->route.addr.dst_storage);
    if (CALL(SYS_connect, base->channel->fd, &at, len) < 0 || say((struct id *)base, REQUEST, param) < 0)
        push((struct id *)base, RDMA_CM_EVENT_REJECTED, 8, NULL, base->channel);
    return 0;
}

int rdma_accept(struct rdma_cm_id *base, struct rdma_conn_param *param)
{
    struct id *id = (struct id *)base;
    return join(id, id->peer) < 0 ? -1 : say(id, REPLY, param);
}

int rdma_reject(struct rdma_cm_id *id, const void *private, uint8_t len)
{
    (void)private, (void)len;
    return say((struct id *)id, REJECT, NULL);
}

int rdma_disconnect(struct rdma_cm_id *base)
{
    struct qp *qp = (struct qp *)base->qp;
    if (qp) {
        qp->failed = true;
        wake(qp, &qp->ends[qp->me]);
    }
    return say((struct id *)base, GOODBYE, NULL);
}

/* A request to connect becomes an id with a socket of its own, above the numbers that programs count on. */
static long take_request(struct id *listener)
{
    struct word word;
    int low = CALL(SYS_accept4, listener->base.channel->fd, 0, 0, SOCK_CLOEXEC);
    if (low < 0)
        return low;
    int fd = CALL(SYS_fcntl, low, F_DUPFD_CLOEXEC, HIGH);
    if (fd < 0)
        fd = low;
    else
        CALL(SYS_close, low);
    /* It follows at once, or the peer has died. */
    if (CALL(SYS_recvfrom, fd, &word, sizeof word, 0) != sizeof word || word.kind != REQUEST) {
        CALL(SYS_close, fd);
        return 0;
    }
    struct id *id = calloc(1, sizeof *id);
    id->base = (struct rdma_cm_id){.channel = listener->base.channel, .verbs = listener->base.verbs};
    id->socket = fd;
    id->segment = word.segment;
    id->peer = word.pid;
    id->is_request = true;
    push(id, RDMA_CM_EVENT_CONNECT_REQUEST, 0, &word, listener->base.channel);
    return 0;
}

/* What the peer of a connection says becomes an event. */
static long take_word(struct id *id)
{
    struct word word = {0};
    long got = CALL(SYS_recvfrom, id->base.channel->fd, &word, sizeof word, MSG_DONTWAIT);
    int kind = 0, status = 0;
    if (id->is_over || (got < 0 && got != -ECONNRESET))
        return -EAGAIN;
    if (got > 0 && word.kind == REPLY)
        kind = join(id, word.pid) == 0 && say(id, READY, NULL) == 0 ? RDMA_CM_EVENT_ESTABLISHED : RDMA_CM_EVENT_CONNECT_ERROR;
    else if (got > 0 && word.kind == READY)
        kind = RDMA_CM_EVENT_ESTABLISHED;
    else if (got > 0 && word.kind == REJECT)
        kind = RDMA_CM_EVENT_REJECTED, status = 28;
    else
        kind = id->is_up ? RDMA_CM_EVENT_DISCONNECTED : RDMA_CM_EVENT_UNREACHABLE;
    id->is_up |= kind == RDMA_CM_EVENT_ESTABLISHED;
    id->is_over = kind != RDMA_CM_EVENT_ESTABLISHED;
    push(id, kind, status, got > 0 ? &word : NULL, id->base.channel);
    return 0;
}

int rdma_get_cm_event(struct rdma_event_channel *base, struct rdma_cm_event **found)
{
    struct cm_channel *channel = (struct cm_channel *)base;
    for (;;) {
        pthread_mutex_lock(&lock);
        struct event *event = channel->first;
        if (event)
            channel->first = event->next;
        pthread_mutex_unlock(&lock);
        if (event) {
            *found = &event->base;
            return 0;
        }
        long got = !channel->id ? -EAGAIN : channel->id->listens ? take_request(channel->id) : take_word(channel->id);
        if (got < 0)
            return result(got == -ECONNABORTED ? -EAGAIN : got);
    }
}

int rdma_ack_cm_event(struct rdma_cm_event *event)
{
    free(event);
    return 0;
}
