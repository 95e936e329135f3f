//! Prints what a ring costs: send and receive of 8 bytes within one thread, a ping-pong between
//! two spinning threads beside a bare cache-line ping-pong, and one-way messages and bulk.
//! Without assertions: a figure to look at, not a test.

// Under loom the ring's bytes are modelled and there is nothing to measure.
#[cfg(loom)]
fn main() {}

#[cfg(not(loom))]
fn main() {
    cost::main();
}

#[cfg(not(loom))]
mod cost {
    use std::hint::{black_box, spin_loop};
    use std::ptr::NonNull;
    use std::sync::atomic::{AtomicU64, Ordering};
    use std::time::Instant;

    use rdmasock_core::fabric::layout::Region;
    use rdmasock_core::fabric::ring::{Consumer, DataArea, DirectionBlock, Producer};

    const AREA: usize = 1 << 20;
    const BATCHES: u64 = 200;

    fn direction(log2: u8) -> (Producer, Consumer) {
        let block: &'static DirectionBlock = Box::leak(Box::default());
        let area: &'static mut [u8] = vec![0u8; AREA].leak();
        // SAFETY: leaked, so it stays, and from here on used through these cursors only.
        unsafe {
            let area = DataArea::new(area.as_mut_ptr(), AREA);
            let mut consumer = Consumer::new(NonNull::from(block), area);
            if let Some(region) = Region::new(0, log2) {
                let _ = consumer.offer(region);
            }
            (Producer::new(NonNull::from(block), area), consumer)
        }
    }

    #[inline(always)]
    fn send(p: &mut Producer, data: &[u8]) -> usize {
        let Ok(spans) = p.spans(data.len()) else {
            return 0;
        };
        // SAFETY: `data` is readable and apart from the ring.
        let n = unsafe { spans.copy_in(0, data.as_ptr(), data.len()) };
        let _ = p.commit(n);
        n
    }

    #[inline(always)]
    fn recv(c: &mut Consumer, buf: &mut [u8]) -> usize {
        let Ok(spans) = c.spans(buf.len()) else {
            return 0;
        };
        // SAFETY: `buf` is writable and apart from the ring.
        let n = unsafe { spans.copy_out(0, buf.as_mut_ptr(), buf.len()) };
        let _ = c.consume(n);
        n
    }

    fn recv_all(c: &mut Consumer, buf: &mut [u8]) {
        let mut done = 0;
        while let Some(rest) = buf.get_mut(done..)
            && !rest.is_empty()
        {
            match recv(c, rest) {
                0 => spin_loop(),
                n => done += n,
            }
        }
    }

    fn send_all(p: &mut Producer, data: &[u8]) {
        let mut done = 0;
        while let Some(rest) = data.get(done..)
            && !rest.is_empty()
        {
            match send(p, rest) {
                0 => spin_loop(),
                n => done += n,
            }
        }
    }

    /// Runs `op` `ops` times; prints the best and the median of batches, since whatever else runs on
    /// the machine shows in single batches.
    fn per_op(name: &str, ops: u64, mut op: impl FnMut()) {
        let batch = (ops / BATCHES).max(1);
        let mut ns: Vec<f64> = (0..BATCHES)
            .map(|_| {
                let start = Instant::now();
                for _ in 0..batch {
                    op();
                }
                start.elapsed().as_nanos() as f64 / batch as f64
            })
            .collect();
        ns.sort_by(f64::total_cmp);
        if let (Some(best), Some(median)) = (ns.first(), ns.get(ns.len() / 2)) {
            println!("{name:<44} best {best:8.2} ns   median {median:8.2} ns");
        }
    }

    fn one_thread(len: usize) {
        let ops = 20_000_000;
        let (mut p, mut c) = direction(12);
        let (data, mut buf) = (vec![1u8; len], vec![0u8; len]);
        per_op(&format!("send + recv of {len} B, one thread"), ops, || {
            send(&mut p, black_box(&data));
            recv(&mut c, black_box(&mut buf));
        });
    }

    fn ping_pong(len: usize) {
        let ops = 2_000_000;
        let ((mut p1, mut c1), (mut p2, mut c2)) = (direction(12), direction(12));
        let echo = std::thread::spawn(move || {
            let mut buf = vec![0u8; len];
            for _ in 0..ops {
                recv_all(&mut c1, &mut buf);
                send_all(&mut p2, &buf);
            }
        });
        let mut buf = vec![0u8; len];
        per_op(&format!("round trip of {len} B, two spinning threads"), ops, || {
            send_all(&mut p1, &buf);
            recv_all(&mut c2, &mut buf);
        });
        let _ = echo.join();
    }

    fn bare_ping_pong() {
        #[repr(align(128))]
        struct Line(AtomicU64);
        static LINES: [Line; 2] = [Line(AtomicU64::new(0)), Line(AtomicU64::new(0))];
        let [there, back] = &LINES;
        let ops = 2_000_000;
        let echo = std::thread::spawn(move || {
            for i in 1..=ops {
                while there.0.load(Ordering::Acquire) != i {
                    spin_loop();
                }
                back.0.store(i, Ordering::Release);
            }
        });
        let mut i = 0;
        per_op("round trip, bare cache lines", ops, || {
            i += 1;
            there.0.store(i, Ordering::Release);
            while back.0.load(Ordering::Acquire) != i {
                spin_loop();
            }
        });
        let _ = echo.join();
    }

    fn one_way(len: usize, log2: u8, ops: u64) {
        let (mut p, mut c) = direction(log2);
        let sender = std::thread::spawn(move || {
            let data = vec![1u8; len];
            for _ in 0..ops {
                send_all(&mut p, &data);
            }
        });
        let mut buf = vec![0u8; len];
        per_op(&format!("one way, {len} B in a ring of 2^{log2} B"), ops, || {
            recv_all(&mut c, &mut buf)
        });
        let _ = sender.join();
    }

    pub fn main() {
        one_thread(8);
        one_thread(64);
        one_thread(1024);
        bare_ping_pong();
        ping_pong(8);
        ping_pong(64);
        one_way(8, 12, 20_000_000);
        one_way(8, 16, 20_000_000);
        one_way(16384, 16, 200_000);
        one_way(131_072, 20, 50_000);
    }
}
