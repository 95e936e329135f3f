//! The two ends of a measurement of what a round trip or a MiB costs (`costs`): a fixed number of them, behind some
//! that do not count. What comes is not compared: that would be counted too.

use anyhow::{Context, Result};

use crate::costs::{Cost, Meter};
use crate::stream::{HELLO, LAST, Stream};
use crate::subject::{Job, Subject};

/// The first byte of the message behind which both ends begin to count.
const COUNTED: u8 = 2;
/// Round trips of which costs are counted, and those before.
const TRIPS: [u32; 2] = [1000, 300];
/// Messages one way of which costs are counted, and those before.
const MESSAGES: [u32; 2] = [48, 16];

fn mebibytes(messages: u32, size: usize) -> f64 {
    f64::from(messages) * size as f64 / f64::from(1 << 20)
}

/// Sends messages back to the last, and prints what the counted ones cost this end.
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

/// Reads messages to the last, says so, and prints what the counted ones cost this end.
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

/// Round trips with an [`echo`].
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

/// Messages to a [`drain`], to its word that it has them all.
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

/// Does so many that do not count, and so many that do, which the meter has seen.
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
