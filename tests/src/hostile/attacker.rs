//! The client of the attack: how it gets its link, as docs/protocol.md says (P13, P32, P22, P25, P37), and its state
//! after that.

use std::io::{Read, Write};
use std::mem::ManuallyDrop;
use std::net::{SocketAddr, TcpStream, UdpSocket};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::rc::Rc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use rdmasock_core::fabric::layout::Layout;
use rdmasock_core::fabric::ring::{Consumer, Producer};
use rdmasock_core::fabric::shm::{End, Outside, Side};
use rdmasock_core::fabric::waiter::{FLAGS_BYTES, FlagPage, WaiterId};
use rdmasock_core::fabric::{LinkEnd, SendError};
use rdmasock_core::ids::{InstanceId, Nonce, Tuple, Vqpn};
use rdmasock_core::os::channel::{Channel, RecvError};
use rdmasock_core::os::memfd;
use rdmasock_core::os::memfd::{Access, Mapping};
use rdmasock_core::os::privatefd::PrivateFd;
use rdmasock_core::rendezvous::control::{Body, DATAGRAM, Datagram, QueryId, Stamp};
use rdmasock_core::rendezvous::names;
use rdmasock_core::wire::marker::{Found, scan};
use rdmasock_core::wire::{Geometry, Hello, LinkAddress, LinkOffer, MAX_MARKER, MAX_MESSAGE, Marker, Message};

use super::REQUEST;

/// The first ring is of one page, as the library's.
const FIRST_RING: u8 = 12;
/// How long one step of the protocol may take.
const PATIENCE: Duration = Duration::from_secs(10);

/// The side channel.
pub struct Outer(Rc<Channel>);

impl Outside for Outer {
    fn send(&self, message: &Message) -> Result<(), SendError> {
        say(&self.0, message, &[]).map_err(|_| SendError::Down)
    }

    /// Rings as a correct peer that has no button.
    fn ring(&self, waiter: WaiterId, page: &FlagPage) {
        if waiter.is_polling() || !page.wake(waiter) {
            let id = waiter.0.into();
            let _ = say(&self.0, &Message::Ring { id }, &[]);
        }
    }
}

/// A client with a link to the victim.
pub struct Attacker {
    pub tcp: TcpStream,
    pub channel: Rc<Channel>,
    /// The attacker's end of the link. It is never dropped, and so outlives the cursors.
    pub end: ManuallyDrop<Box<End<Outer>>>,
    pub consumer: Consumer,
    pub producer: Producer,
    /// The victim's number for the stream.
    pub theirs: Vqpn,
    nonce_s: Nonce,
    pub victim: InstanceId,
    /// The page of flags that the victim reads.
    pub flags: FlagPage,
    pub arena: PrivateFd,
    /// The bells that the victim has sent to wake its waiters.
    pub bells: Vec<PrivateFd>,
}

/// Sends a message, and waits for room: the victim may be busy with the descriptors of earlier messages.
pub fn say(channel: &Channel, message: &Message, fds: &[BorrowedFd<'_>]) -> Result<()> {
    let end = Instant::now() + PATIENCE;
    let mut buf = [0; MAX_MESSAGE];
    let bytes = message.encode(&mut buf).map_err(|e| anyhow!("{e}"))?;
    loop {
        match channel.send(bytes, fds) {
            Err(error) if error.raw_os_error() == libc::EAGAIN && Instant::now() < end => {
                std::thread::sleep(Duration::from_millis(1));
            }
            sent => return Ok(sent?),
        }
    }
}

/// Returns the next message; fails after [`PATIENCE`].
fn hear(channel: &Channel) -> Result<(Message, Vec<PrivateFd>)> {
    let end = Instant::now() + PATIENCE;
    let mut buf = [0; MAX_MESSAGE];
    loop {
        match channel.recv(&mut buf) {
            Ok(received) => {
                return Ok((Message::decode(received.bytes)?, received.fds));
            }
            Err(RecvError::WouldBlock) if Instant::now() < end => {
                std::thread::sleep(Duration::from_millis(1));
            }
            Err(error) => bail!("no message: {error}"),
        }
    }
}

/// Sends one request over TCP and receives its answer.
pub fn exchange(tcp: &mut TcpStream) -> Result<()> {
    tcp.write_all(&[b'a'; REQUEST])?;
    let mut answer = [0; REQUEST];
    Ok(tcp.read_exact(&mut answer)?)
}

impl Attacker {
    /// Connects, and goes as far as a link on which the victim sends. `data` is the size in bytes of the arena that the
    /// victim is offered.
    pub fn connect(port: u16, data: u64) -> Result<Self> {
        Self::connect_with(port, data, None)
    }

    /// As [`connect`](Self::connect), with `flags` in the place of its page of flags.
    pub fn connect_with(port: u16, data: u64, flags: Option<BorrowedFd<'_>>) -> Result<Self> {
        let mut tcp = TcpStream::connect(("127.0.0.1", port))?;
        tcp.set_read_timeout(Some(PATIENCE))?;
        exchange(&mut tcp).context("before the link")?;
        let (nonce_c, me) = (Nonce::random()?, InstanceId::random()?);
        let (_asked, nonce_s, victim) = ask(port, &tcp, nonce_c, me)?;
        put(&mut tcp, &nonce_s, hello(me))?;
        let offer = match get(&mut tcp, &nonce_c)? {
            Marker::Hello(hello) => hello.link.context("HELLO without a link")?,
            other => bail!("{other:?} for HELLO"),
        };
        let (channel, mut parts) = link(&offer, me, victim, data, flags)?;
        let opened = parts.end.open(FIRST_RING)?;
        let open = Message::Open {
            nonce_mine: nonce_c,
            nonce_yours: nonce_s,
            vqpn: opened.vqpn,
            ring: opened.ring,
        };
        say(&channel, &open, &[])?;
        let theirs = loop {
            match hear(&channel)? {
                (Message::OpenAck { mine, .. }, _) => break mine,
                (Message::Waiter { .. }, fds) => parts.bells.extend(fds),
                (other, _) => bail!("{other:?} for OPEN-ACK"),
            }
        };
        let producer = parts.end.producer(theirs).context("a producer")?;
        match get(&mut tcp, &nonce_c)? {
            Marker::Switch => {}
            other => bail!("{other:?} for SWITCH"),
        }
        Ok(Self {
            tcp,
            channel,
            end: parts.end,
            consumer: opened.consumer,
            producer,
            theirs,
            nonce_s,
            victim,
            flags: parts.flags,
            arena: parts.arena,
            bells: parts.bells,
        })
    }

    /// Moves the sending direction to the link, too.
    pub fn switch(&mut self) -> Result<()> {
        put(&mut self.tcp, &self.nonce_s, Marker::Switch)
    }

    /// Sends a request on the link, and notifies the victim as a correct peer does. False if there is no room.
    pub fn request(&mut self, first: u8) -> Result<bool> {
        let Ok(spans) = self.producer.spans(REQUEST) else {
            bail!("the victim's ring is not one any more");
        };
        if spans.len() < REQUEST {
            return Ok(false);
        }
        let request = [first; REQUEST];
        // SAFETY: the ring is mapped as long as the process lives, and the request is readable.
        unsafe { spans.copy_in(0, request.as_ptr(), REQUEST) };
        let wake = self.producer.commit(REQUEST);
        self.end.notify(wake, self.theirs);
        Ok(true)
    }

    /// Drops the victim's answers. Returns the number of bytes.
    pub fn swallow(&mut self) -> usize {
        let n = self.consumer.spans(1).map_or(0, |s| s.len());
        let wake = self.consumer.consume(n);
        self.end.notify(wake, self.theirs);
        let wake = self.consumer.publish();
        self.end.notify(wake, self.theirs);
        n
    }

    /// Announces one of its waiters, with any descriptor.
    pub fn announce(&self, id: u32, fd: BorrowedFd<'_>) -> Result<()> {
        say(&self.channel, &Message::Waiter { id }, &[fd])
    }

    /// Receives the victim's messages. False once the victim has closed the channel.
    pub fn listen(&mut self) -> bool {
        let mut buf = [0; MAX_MESSAGE];
        loop {
            match self.channel.recv(&mut buf) {
                Ok(received) => self.bells.extend(received.fds),
                Err(RecvError::WouldBlock) => return true,
                Err(_) => return false,
            }
        }
    }
}

/// Asks about its own connection. The channel has to stay open until HELLO is in TCP (P16).
fn ask(port: u16, tcp: &TcpStream, nonce_c: Nonce, me: InstanceId) -> Result<(Channel, Nonce, InstanceId)> {
    let tuple = Tuple::new(tcp.local_addr()?, tcp.peer_addr()?).at(namespace()?, 0);
    match ask_by_name(port, tuple, nonce_c, me)? {
        (
            channel,
            Message::Yes {
                nonce_s, instance_s, ..
            },
        ) => Ok((channel, nonce_s, instance_s)),
        (_, other) => bail!("{other:?} for YES"),
    }
}

/// Asks about a connection by the victim's name. Returns the channel and the answer.
pub fn ask_by_name(port: u16, tuple: Tuple, nonce_c: Nonce, me: InstanceId) -> Result<(Channel, Message)> {
    let channel = names::connect_to_services(port)
        .next()
        .context("the victim has no name")??;
    let ask = Message::Ask {
        request: 1,
        tuple,
        nonce_c,
        instance_c: me,
    };
    say(&channel, &ask, &[])?;
    let answer = hear(&channel)?.0;
    Ok((channel, answer))
}

/// Asks about a connection by the control port of this host. Returns the answer.
pub fn ask_by_control_port(port: u16, tuple: Tuple, nonce_c: Nonce, instance_c: InstanceId) -> Result<Option<Body>> {
    let socket = UdpSocket::bind(SocketAddr::new(tuple.connector().ip(), 0))?;
    socket.connect(SocketAddr::new(tuple.acceptor().ip(), port))?;
    socket.set_read_timeout(Some(Duration::from_secs(1)))?;
    let mut stamp = Stamp::NONE;
    let query = QueryId::random()?;
    for _ in 0..10 {
        let body = Body::Ask {
            request: 1,
            tuple,
            nonce_c,
            instance_c,
        };
        let question = Datagram { query, stamp, body }.encode(None);
        let mut buf = [0; DATAGRAM];
        if socket.send(&question).is_err() || socket.recv(&mut buf).is_err() {
            std::thread::sleep(Duration::from_millis(50));
            continue;
        }
        match Datagram::decode(&buf, None).map_err(|e| anyhow!("{e:?}"))? {
            Datagram {
                stamp: good,
                body: Body::Stamp,
                ..
            } => stamp = good,
            answer => return Ok(Some(answer.body)),
        }
    }
    Ok(None)
}

/// The cookie of this process' network namespace.
pub fn namespace() -> Result<u64> {
    // libc has no such constant.
    const SO_NETNS_COOKIE: libc::c_int = 71;
    let socket = UdpSocket::bind("127.0.0.1:0")?;
    let (mut cookie, mut len) = (0u64, size_of::<u64>() as libc::socklen_t);
    let to = (&raw mut cookie).cast();
    call!(libc::getsockopt(
        socket.as_raw_fd(),
        libc::SOL_SOCKET,
        SO_NETNS_COOKIE,
        to,
        &mut len
    ));
    Ok(cookie)
}

pub fn hello(me: InstanceId) -> Marker {
    Marker::Hello(Hello {
        instance: me,
        link: None,
    })
}

fn put(tcp: &mut TcpStream, to: &Nonce, marker: Marker) -> Result<()> {
    let mut buf = [0; MAX_MARKER];
    let bytes = marker.encode(to, &mut buf).map_err(|e| anyhow!("{e}"))?;
    Ok(tcp.write_all(bytes)?)
}

/// Reads the next marker, byte by byte, so that no byte behind it is read.
fn get(tcp: &mut TcpStream, nonce: &Nonce) -> Result<Marker> {
    let mut bytes = Vec::new();
    loop {
        let mut byte = [0];
        tcp.read_exact(&mut byte)?;
        bytes.push(byte[0]);
        match scan(nonce, &bytes).what {
            Found::Marker { marker, .. } => return Ok(marker?),
            Found::Payload | Found::PartialMarker { .. } => {}
        }
    }
}

/// Returns sealed memory and a mapping of it.
fn shared(name: &str, bytes: u64) -> Result<(PrivateFd, Mapping)> {
    let fd = memfd::create_file(name, bytes)?;
    let mapping = memfd::map_received(fd.as_fd(), bytes, Access::ReadWrite)?;
    Ok((fd, mapping))
}

struct Parts {
    end: ManuallyDrop<Box<End<Outer>>>,
    flags: FlagPage,
    arena: PrivateFd,
    bells: Vec<PrivateFd>,
}

fn link(
    offer: &LinkOffer,
    me: InstanceId,
    victim: InstanceId,
    data: u64,
    other_flags: Option<BorrowedFd<'_>>,
) -> Result<(Rc<Channel>, Parts)> {
    if offer.address != LinkAddress::Shm {
        bail!("a link to another host");
    }
    let channel = Rc::new(names::connect_to(names::instance(&victim).as_bytes())?);
    let layout = Layout::for_data(data).context("no such arena")?;
    let (arena, mapping) = shared("hostile-arena", layout.file_len())?;
    let mine = Side::new(mapping, layout).context("an arena")?;
    let (flags_fd, flags) = shared("hostile-flags", FLAGS_BYTES)?;
    let geometry = Geometry {
        arena_bytes: layout.file_len(),
        max_ring: 64 << 20,
    };
    let message = Message::Link {
        cookie: offer.cookie,
        instance_c: me,
        pid: std::process::id(),
        geometry,
    };
    let fds = [arena.as_fd(), other_flags.unwrap_or(flags_fd.as_fd())];
    say(&channel, &message, &fds)?;
    let (theirs, their_flags) = match hear(&channel)? {
        (
            Message::LinkAccept {
                instance_s, geometry, ..
            },
            fds,
        ) if instance_s == victim => map(&geometry, &fds)?,
        (other, _) => bail!("{other:?} for LINK-ACCEPT"),
    };
    // SAFETY: the end is never dropped; there is one stream, and one producer for it.
    let end = unsafe { End::new(mine, theirs, their_flags, Outer(Rc::clone(&channel))) };
    let parts = Parts {
        end: ManuallyDrop::new(Box::new(end)),
        flags: FlagPage::new(flags).context("a page of flags")?,
        arena,
        bells: Vec::new(),
    };
    Ok((channel, parts))
}

fn map(geometry: &Geometry, fds: &[PrivateFd]) -> Result<(Side, FlagPage)> {
    let [arena, flags] = fds else {
        bail!("{} descriptors", fds.len());
    };
    let mapping = memfd::map_received(arena.as_fd(), geometry.arena_bytes, Access::ReadWrite)?;
    let layout = Layout::of_file(geometry.arena_bytes).context("the size of an arena")?;
    let flags = memfd::map_received(flags.as_fd(), FLAGS_BYTES, Access::ReadOnly)?;
    let side = Side::new(mapping, layout).context("the victim's arena")?;
    Ok((side, FlagPage::new(flags).context("the victim's flags")?))
}
