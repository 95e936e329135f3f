//! The loads of `bench device` on bare queue pairs, as a program would use them without the library.

use std::sync::Mutex;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow, ensure};
use rdmasock_core::fabric::remote::qp::{Completed, Key, PostError, QueuePair, Read, Role};
use rdmasock_localnic::settings::Settings;
use rdmasock_localnic::within::{LocalQp, pair};

use super::{TRANSFER, costs, numbers, processor, trips_of};
use crate::results::Figure;

fn connected(settings: Settings) -> Result<[LocalQp; 2]> {
    pair(settings).map_err(|error| anyhow!("no queue pair: errno {}", error.0))
}

/// Polls the completion queue, and returns the number of messages received.
fn poll(qp: &LocalQp) -> Result<u64> {
    let mut messages = 0;
    let polled = qp.poll(&mut |completed| messages += u64::from(matches!(completed, Completed::Received(_))));
    polled.map_err(|down| anyhow!("{down}"))?;
    Ok(messages)
}

/// Posts a message; polls while the send queue is full.
fn send(qp: &LocalQp, message: &[u8]) -> Result<()> {
    while let Err(error) = qp.send(message) {
        ensure!(error == PostError::Full, "{error}");
        poll(qp)?;
    }
    Ok(())
}

/// Sends a message to and fro, and returns the times of the round trips.
pub fn trips(settings: Settings, bytes: usize, time: Duration) -> Result<Vec<(Figure, f64)>> {
    let [here, there] = connected(settings)?;
    let message = vec![7; bytes];
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let echo = scope.spawn(|| {
            while !is_over.load(Relaxed) {
                if poll(&there)? > 0 {
                    send(&there, &message)?;
                }
            }
            Ok::<_, anyhow::Error>(())
        });
        let trips = trips_of(time, || {
            send(&here, &message)?;
            while poll(&here)? == 0 {
                std::hint::spin_loop();
            }
            Ok(())
        });
        is_over.store(true, Relaxed);
        echo.join().map_err(|_| anyhow!("the other thread"))??;
        trips
    })
}

/// Sends messages one way from several threads on one queue pair, as many as the receive buffers allow. A thread holds
/// a lock while it posts or polls.
pub fn one_way(settings: Settings, bytes: usize, threads: usize, time: Duration) -> Result<Vec<(Figure, f64)>> {
    let [here, there] = connected(settings)?;
    let buffers = u64::from(here.limits().receive_buffers);
    let (sent, answered) = (AtomicU64::new(0), AtomicU64::new(0));
    let here = Mutex::new(here);
    let message = vec![7; bytes];
    let is_over = AtomicBool::new(false);
    let post = || {
        while !is_over.load(Relaxed) {
            let Ok(here) = here.lock() else { break };
            // An answer stands for half of the buffers. The last messages get no answer.
            if sent.load(Relaxed) - answered.load(Relaxed) * (buffers / 2) < buffers {
                send(&here, &message)?;
                sent.fetch_add(1, Relaxed);
            } else {
                answered.fetch_add(poll(&here)?, Relaxed);
            }
        }
        Ok::<_, anyhow::Error>(())
    };
    std::thread::scope(|scope| {
        let all: Vec<_> = (0..threads).map(|_| scope.spawn(post)).collect();
        let (since, mut received, mut told) = (Instant::now(), 0, 0);
        while since.elapsed() < time {
            received += poll(&there)?;
            while told < received / (buffers / 2) {
                send(&there, b"!")?;
                told += 1;
            }
        }
        let seconds = since.elapsed().as_secs_f64();
        is_over.store(true, Relaxed);
        for thread in all {
            thread.join().map_err(|_| anyhow!("another thread"))??;
        }
        Ok(vec![(Figure::Messages, received as f64 / seconds)])
    })
}

/// A READ between the registered memory of both ends. The memory is never released.
struct Transfer {
    read: Read,
}

fn transfer(qps: &[LocalQp; 2]) -> Result<Transfer> {
    let [here, there] = qps;
    let register = |qp: &LocalQp, role| {
        let memory = vec![7_u8; TRANSFER].leak();
        let at = memory.as_mut_ptr();
        // SAFETY: the memory is leaked, and only this pointer refers to it.
        let region = unsafe { qp.register(at, TRANSFER, role) }.map_err(|down| anyhow!("{down}"))?;
        Ok::<(*mut u8, Key), anyhow::Error>((at, region.key))
    };
    let (to, sink) = register(here, Role::Both)?;
    let (from, source) = register(there, Role::Offered)?;
    let read = Read {
        to,
        local: sink.local,
        len: TRANSFER as u32,
        from: from.expose_provenance() as u64,
        remote: source.remote,
    };
    Ok(Transfer { read })
}

/// Makes one READ after the other, each on a random connection. If `is_own`, each connection has a queue pair, else all
/// share one.
pub fn reads(settings: Settings, connections: usize, is_own: bool, time: Duration) -> Result<Vec<(Figure, f64)>> {
    let pairs = if is_own { connections } else { 1 };
    let pairs = (0..pairs).map(|_| connected(settings)).collect::<Result<Vec<_>>>()?;
    let of = |number: usize| pairs.get(number % pairs.len()).ok_or_else(|| anyhow!("no connection"));
    let transfers = (0..connections).map(|number| transfer(of(number)?));
    let transfers = transfers.collect::<Result<Vec<_>>>()?;
    let mut next = numbers(connections);
    let (since, before, mut bytes) = (Instant::now(), processor()?, 0);
    while since.elapsed() < time {
        let number = next();
        let ([here, _], Some(transfer)) = (of(number)?, transfers.get(number)) else {
            break;
        };
        // SAFETY: the target is registered, and no reference to it exists.
        unsafe { here.read(&transfer.read) }?;
        let mut is_done = false;
        while !is_done {
            let polled = here.poll(&mut |completed| is_done |= matches!(completed, Completed::Read));
            polled.map_err(|down| anyhow!("{down}"))?;
        }
        bytes += TRANSFER as u64;
    }
    costs(bytes, since.elapsed(), processor()? - before)
}
