//! The program at a simulated end. None of its calls waits.

use std::cell::Ref;

use rdmasock_core::stats::Reason;
use rdmasock_core::stream::connection;
use rdmasock_core::stream::connection::{Ahead, AtMark, Farewell};
use rdmasock_core::stream::mode::Mode;

use super::Endpoint;

impl Endpoint {
    /// Returns the bytes that the program has received.
    pub fn received(&self) -> Ref<'_, Vec<u8>> {
        self.received.borrow()
    }

    /// Returns whether the program has received EOF.
    pub fn has_read_end(&self) -> bool {
        self.eof.get()
    }

    /// Returns whether the program has shut its sending direction down.
    pub fn has_shut(&self) -> bool {
        self.fin.get()
    }

    /// Ends the attempt.
    pub fn give_up(&self) {
        connection::end_attempt(self, &mut self.control());
    }

    /// Asks that both directions go back to TCP.
    pub fn leave(&self) {
        connection::leave(self, &mut self.control(), Reason::Unsupported);
    }

    /// As [`leave`](Self::leave), but this end's receiving direction goes back to TCP at once, unless
    /// the other end has ended it already.
    pub fn return_to_tcp(&self) {
        let stays = self.is_staying();
        let mut control = self.control();
        if stays && control.handshake.is_none() {
            connection::return_to_tcp(self, &mut control, Reason::Unsupported);
        } else {
            connection::prefer_tcp(self, &mut control, Reason::Unsupported);
        }
    }

    /// A read enters the kernel, and blocks there.
    pub fn enter_read(&self) {
        if self.rx() == Mode::Tcp && !self.inside.replace(true) {
            self.rx_inside.enter();
        }
    }

    /// Reads up to `n` bytes, as far as they have arrived.
    pub fn read(&self, n: usize) -> usize {
        let before = self.received.borrow().len();
        let got = || self.received.borrow().len() - before;
        if self.inside.get() {
            self.read_inside(n);
        }
        while got() < n && !self.inside.get() {
            let want = n - got();
            let goes_on = match self.rx() {
                Mode::Tcp => self.read_tcp(want),
                Mode::Link => self.read_link(want),
                Mode::Marked => self.read_marked(want),
                Mode::Foreign => unreachable!("nobody forks here"),
            };
            if !goes_on {
                break;
            }
        }
        got()
    }

    fn read_tcp(&self, want: usize) -> bool {
        let (bytes, is_ended) = {
            let mut inn = self.net.inn.borrow_mut();
            let n = inn.peek().len().min(want);
            (inn.take(n), inn.is_ended())
        };
        self.eof.set(bytes.is_empty() && is_ended);
        assert!(!self.eof.get() || self.owed() == 0, "TCP ends too early");
        self.received.borrow_mut().extend(&bytes);
        !bytes.is_empty()
    }

    /// A read that entered the kernel before the scan began returns with the bytes that are there.
    fn read_inside(&self, want: usize) {
        let mut bytes = {
            let mut inn = self.net.inn.borrow_mut();
            let n = inn.peek().len().min(want);
            if n == 0 && !inn.is_ended() {
                return;
            }
            inn.take(n)
        };
        let mut kept = bytes.len();
        if self.rx() != Mode::Tcp {
            kept = connection::scan_taken(self, &mut bytes);
        }
        self.received.borrow_mut().extend(&bytes[..kept]);
        self.rx_inside.leave();
        self.inside.set(false);
        self.on_tcp();
    }

    fn read_link(&self, want: usize) -> bool {
        let mut rx = self.rx.lock().unwrap();
        // This comes before the ring is read: all bytes sent before the end are in the ring when this end sees the end.
        let is_over = connection::is_over(self, &rx);
        let stays = rx.stays();
        let consumer = rx.consumer.as_mut().unwrap();
        let spans = consumer.spans(want).unwrap();
        let mut piece = vec![0; spans.len().min(want)];
        // SAFETY: the piece is writable and apart from the ring.
        unsafe { spans.copy_out(0, piece.as_mut_ptr(), piece.len()) };
        let _ = consumer.consume(piece.len());
        self.received.borrow_mut().extend(&piece);
        if !piece.is_empty() {
            return true;
        }
        let end = consumer.end().unwrap();
        if !is_over && (stays || end.is_none()) {
            return false;
        }
        drop(rx);
        connection::leave_link_at_end(self)
    }

    fn read_marked(&self, want: usize) -> bool {
        let mut control = self.control();
        let rx = self.rx.lock().unwrap();
        let (ahead, mut rx) = match connection::seen_ahead(self, &rx, want) {
            Some(ahead) => (ahead, rx),
            None => connection::look_ahead(self, &mut control, rx, AtMark::GoOn).unwrap(),
        };
        match ahead {
            Ahead::Changed => true,
            Ahead::Nothing | Ahead::Shut => false,
            Ahead::Ended => {
                connection::on_end_told(self, &mut rx);
                true
            }
            Ahead::Payload { carry, kernel } => {
                let from_carry = carry.min(want);
                let rest = kernel.min(want - from_carry);
                let mut received = self.received.borrow_mut();
                received.extend(&rx.carry.as_slice()[..from_carry]);
                rx.carry.consume(from_carry);
                received.extend(self.net.inn.borrow_mut().take(rest));
                rx.on_taken(from_carry + rest);
                if rx.scanned == 0 {
                    let _ = connection::look_ahead(self, &mut control, rx, AtMark::Stop);
                }
                true
            }
        }
    }

    /// Writes; returns the number of bytes accepted.
    pub fn write(&self, data: &[u8]) -> usize {
        if self.fin.get() {
            return 0;
        }
        if self.tx() == Mode::Marked && !connection::flush(self) {
            let is_suspended = self.tx.lock().is_some_and(|tx| tx.then.waits());
            let is_full = self.net.out.borrow().room() == 0;
            assert!(is_full || is_suspended, "a write waits for more than room");
            return 0;
        }
        if self.tx() != Mode::Link {
            return self.net.out.borrow_mut().write(data);
        }
        let mut tx = self.tx.lock().unwrap();
        let producer = tx.producer.as_mut().unwrap();
        let spans = producer.spans(data.len()).unwrap();
        // SAFETY: the data is readable and apart from the ring.
        let n = unsafe { spans.copy_in(0, data.as_ptr(), data.len()) };
        let _ = producer.commit(n);
        n
    }

    /// Calls shutdown(SHUT_WR). The connection finishes the step that it has begun before the end.
    pub fn shut(&self) {
        self.fin.set(true);
        let mut farewell = Farewell::NONE;
        if !connection::shut(self, false, &mut farewell) {
            self.net.out.borrow_mut().shut();
        }
        farewell.tell();
    }
}
