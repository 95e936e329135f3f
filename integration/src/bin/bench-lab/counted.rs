//! The two ends of a measurement of the cost of a round trip or a MiB (`costs`). A fixed number of round trips or
//! messages counts, and a fixed number before does not. The ends do not compare the bytes that arrive, as the cost of a
//! comparison would be counted.

use anyhow::{Context, Result};

use crate::costs::{Cost, Meter};
use crate::stream::{HELLO, LAST, Stream};
use crate::subject::{Job, Subject};

/// The first byte of the message after which both ends begin to count.
const COUNTED: u8 = 2;
/// The number of round trips that count, and of those before that do not.
const TRIPS: [u32; 2] = [1000, 300];
/// The number of messages one way that count, and of those before that do not.
const MESSAGES: [u32; 2] = [48, 16];

fn mebibytes(messages: u32, size: usize) -> f64 {
    f64::from(messages) * size as f64 / f64::from(1 << 20)
}

/// Sends every message back, up to the last, and prints what the counted ones cost this end.
pub fn echo(stream: &Stream, size: usize, subject: Subject) -> Result<()> {
    let (mut ball, mut meter, mut trips) = (vec![0; size], None, 0_u32);
    loop {
        stream.receive_all(&mut ball)?;
        stream.send_all(&ball)?;
        trips += u32::from(meter.is_some());
        match ball.first() {
            Some(&COUNTED) => meter = Some(Meter::begin()?),
            Some(&LAST) => {
                let meter = meter.context("an end without a beginning")?;
                return meter
                    .end(subject, Job::TripCosts, size as u32, trips.into())?
                    .print(None);
            }
            _ => {}
        }
    }
}

/// Reads messages up to the last, confirms the last, and prints what the counted ones cost this end.
pub fn drain(stream: &Stream, size: usize, subject: Subject) -> Result<()> {
    let (mut message, mut meter, mut messages) = (vec![0; size], None, 0_u32);
    loop {
        stream.receive_all(&mut message)?;
        messages += u32::from(meter.is_some());
        match message.first() {
            Some(&COUNTED) => meter = Some(Meter::begin()?),
            Some(&LAST) => {
                stream.send_all(&[LAST; HELLO])?;
                let meter = meter.context("an end without a beginning")?;
                let cost = meter.end(subject, Job::StreamCosts, size as u32, mebibytes(messages, size))?;
                return cost.print(None);
            }
            _ => {}
        }
    }
}

/// Makes round trips with a peer in [`echo`], and returns what the counted ones cost this end.
pub fn trips(stream: &Stream, subject: Subject, size: u32) -> Result<Cost> {
    let (mut ball, mut back) = (vec![7; size as usize], vec![0; size as usize]);
    let meter = count(TRIPS, |mark| {
        if let Some(first) = ball.first_mut() {
            *first = mark;
        }
        stream.send_all(&ball)?;
        stream.receive_all(&mut back)
    })?;
    meter.end(subject, Job::TripCosts, size, TRIPS[0].into())
}

/// Sends messages to a peer in [`drain`], and waits until the peer confirms the last. Returns what the counted ones
/// cost this end.
pub fn stream(stream: &Stream, subject: Subject, size: u32) -> Result<Cost> {
    let mut message = vec![0; size as usize];
    let meter = count(MESSAGES, |mark| {
        if let Some(first) = message.first_mut() {
            *first = mark;
        }
        stream.send_all(&message)
    })?;
    stream.receive_all(&mut [0; HELLO])?;
    meter.end(subject, Job::StreamCosts, size, mebibytes(MESSAGES[0], size as usize))
}

/// Calls `each` `before` times without counting and then `counted` times, and returns the meter of the latter.
fn count([counted, before]: [u32; 2], mut each: impl FnMut(u8) -> Result<()>) -> Result<Meter> {
    for number in 1..=before {
        each(if number == before { COUNTED } else { 0 })?;
    }
    let meter = Meter::begin()?;
    for number in 1..=counted {
        each(if number == counted { LAST } else { 0 })?;
    }
    Ok(meter)
}
