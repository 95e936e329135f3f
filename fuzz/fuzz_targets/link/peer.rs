//! The messages of the peer: values that are right, nearly right, or arbitrary. `main.rs` checks how this end handles
//! them.

use libfuzzer_sys::arbitrary;
use libfuzzer_sys::arbitrary::Arbitrary;
use rdmasock_core::fabric::remote::record::{Builder, Memory, Record, Withdrawal};
use rdmasock_core::ids::Vqpn;
use rdmasock_core::wire::{MAX_MESSAGE, Message};

use super::wire::{Arrived, Wire};
use super::{PAGES, Stream, use_pages};

/// A message or WRITE of the peer's.
#[derive(Arbitrary, Debug)]
pub enum Said<'a> {
    Records(Vec<Say<'a>>, Value),
    Bytes(&'a [u8]),
    Written { to: Number, bytes: u16 },
}

/// A value relative to the one that a correct peer would send now.
#[derive(Arbitrary, Debug, Clone, Copy)]
pub enum Value {
    Right,
    Near(i8),
    Any(u64),
}

impl Value {
    fn of(self, right: u64) -> u64 {
        match self {
            Self::Right => right,
            Self::Near(by) => right.wrapping_add_signed(by.into()),
            Self::Any(value) => value,
        }
    }
}

/// A stream number of this end.
#[derive(Arbitrary, Debug, Clone, Copy)]
pub enum Number {
    Open(u8),
    Any(u32),
}

/// A record that the peer sends.
#[derive(Arbitrary, Debug)]
pub enum Say<'a> {
    Data {
        to: Number,
        tail: Value,
        skip: u8,
        payload: &'a [u8],
    },
    Switch {
        to: Number,
        generation: Value,
        position: Value,
    },
    End {
        to: Number,
        end: u8,
        tail: Value,
    },
    Limited {
        to: Number,
        count: u32,
    },
    Head {
        to: Number,
        head: Value,
    },
    Offer {
        to: Number,
        generation: Value,
        log2: u8,
        page: u8,
    },
    OfferWord {
        to: Number,
        word: u64,
    },
    Flags {
        to: Number,
        flags: u32,
    },
    Stop {
        to: Number,
    },
    Chunk {
        index: Value,
        rkey: u32,
        base: u64,
    },
    Message(&'a [u8]),
    Closed(Number),
    Refuse(Number),
    Confirm {
        to: Number,
    },
    Ack {
        to: Number,
        tail: Value,
    },
    Tell {
        to: Number,
        word: u32,
    },
    Advert {
        to: Number,
        position: Value,
        address: u64,
        length: u32,
    },
    Withdraw {
        to: Number,
        serial: u32,
        position: Value,
        is_final: bool,
    },
    Placed {
        to: Number,
        tail: Value,
    },
    Source {
        to: Number,
        position: Value,
        address: u64,
        length: u32,
    },
    Taken {
        to: Number,
        serial: u32,
        tail: Value,
    },
}

/// Returns the stream, if the number is one of this end's, and its number.
fn find(streams: &mut [Stream], number: Number) -> (Option<&mut Stream>, u32) {
    match number {
        Number::Any(number) => (None, number),
        Number::Open(n) => {
            let n = usize::from(n).checked_rem(streams.len());
            match n.and_then(|n| streams.get_mut(n)) {
                Some(stream) => {
                    let number = stream.mine.0;
                    (Some(stream), number)
                }
                None => (None, 0),
            }
        }
    }
}

impl Said<'_> {
    /// Returns records for the first stream: a switch to the offered ring, a registered chunk of memory, an offer of a
    /// ring.
    pub fn rings() -> Self {
        let (to, right) = (Number::Open(0), Value::Right);
        let switch = Say::Switch {
            to,
            generation: right,
            position: right,
        };
        let chunk = Say::Chunk {
            index: right,
            rkey: 7,
            base: 1 << 40,
        };
        let offer = Say::Offer {
            to,
            generation: right,
            log2: 1,
            page: 0,
        };
        Self::Records(vec![switch, chunk, offer], right)
    }

    /// Returns the event as it arrives, and updates the counts of a correct peer.
    pub fn event(&self, streams: &mut [Stream], pages: &mut [bool; PAGES], wire: &Wire) -> Arrived {
        match self {
            Self::Bytes(bytes) => Arrived::Message(bytes.to_vec()),
            Self::Written { to, bytes } => {
                let (stream, immediate) = find(streams, *to);
                if let Some(s) = stream {
                    s.told = s.told.wrapping_add(u64::from(*bytes));
                }
                let bytes = (*bytes).into();
                Arrived::Written { immediate, bytes }
            }
            Self::Records(all, grant) => {
                let mut builder = Builder::new(4096);
                for say in all {
                    say.add(streams, pages, wire, &mut builder);
                }
                let grant = grant.of(wire.owes().into());
                Arrived::Message(builder.finish(grant as u16).to_vec())
            }
        }
    }
}

impl Say<'_> {
    fn add(&self, streams: &mut [Stream], pages: &mut [bool; PAGES], wire: &Wire, out: &mut Builder) {
        let record = match *self {
            Self::Data {
                to,
                tail,
                skip,
                payload,
            } => {
                let payload = &payload[..payload.len().min(1000)];
                let (stream, theirs) = find(streams, to);
                let mut own = 0;
                let told = stream.map_or(&mut own, |s| &mut s.told);
                *told = tail.of(told.wrapping_add(payload.len() as u64 + u64::from(skip)));
                let tail = *told;
                Record::Data { theirs, tail, payload }
            }
            Self::Switch {
                to,
                generation,
                position,
            } => {
                let (stream, theirs) = find(streams, to);
                let (offers, told) = stream.map_or((1, 0), |s| (s.offers, s.told));
                Record::Switch {
                    theirs,
                    generation: generation.of(offers.into()) as u32,
                    position: position.of(told),
                }
            }
            Self::End { to, end, tail } => {
                let (stream, theirs) = find(streams, to);
                Record::End {
                    theirs,
                    end,
                    tail: tail.of(stream.map_or(0, |s| s.told)),
                }
            }
            Self::Limited { to, count } => Record::Limited {
                theirs: find(streams, to).1,
                count,
            },
            Self::Head { to, head } => {
                let (stream, theirs) = find(streams, to);
                Record::Head {
                    theirs,
                    head: head.of(stream.map_or(0, |s| sent(s))),
                }
            }
            Self::Offer {
                to,
                generation,
                log2,
                page,
            } => {
                let (stream, theirs) = find(streams, to);
                let mut own = 0;
                let offers = stream.map_or(&mut own, |s| &mut s.their_offers);
                *offers += 1;
                let generation = generation.of((*offers).into()) & 0xff_ffff;
                let (page, log2) = (page % 20, 11 + log2 % 6);
                use_pages(pages, page.into(), log2);
                let word = generation << 40 | u64::from(log2) << 32 | u64::from(page);
                Record::Offer { theirs, word }
            }
            Self::OfferWord { to, word } => {
                use_pages(pages, word as u32, (word >> 32) as u8);
                let theirs = find(streams, to).1;
                Record::Offer { theirs, word }
            }
            Self::Flags { to, flags } => Record::Flags {
                theirs: find(streams, to).1,
                flags,
            },
            Self::Stop { to } => Record::Stop {
                theirs: find(streams, to).1,
            },
            Self::Chunk { index, rkey, base } => {
                let index = index.of(wire.next_chunk().into()) as u32;
                wire.on_chunk(rkey, base);
                Record::Chunk { index, rkey, base }
            }
            Self::Message(bytes) => Record::Message { bytes },
            Self::Closed(number) | Self::Refuse(number) => {
                let yours = Vqpn(find(streams, number).1);
                let message = if matches!(self, Self::Closed(_)) {
                    Message::Closed { yours }
                } else {
                    Message::Adopt { yours }
                };
                let mut buf = [0; MAX_MESSAGE];
                let bytes = message.encode(&mut buf).expect("it fits");
                out.push(&Record::Message { bytes });
                return;
            }
            Self::Confirm { to } => Record::Confirm {
                theirs: find(streams, to).1,
            },
            Self::Ack { to, tail } => {
                let (stream, theirs) = find(streams, to);
                Record::Ack {
                    theirs,
                    tail: tail.of(stream.map_or(0, |s| sent(s))),
                }
            }
            Self::Tell { to, word } => Record::Tell {
                theirs: find(streams, to).1,
                word,
            },
            Self::Advert {
                to,
                position,
                address,
                length,
            } => {
                let (stream, theirs) = find(streams, to);
                Record::Advert {
                    theirs,
                    memory: Memory {
                        serial: length,
                        position: position.of(stream.map_or(0, |s| sent(s))),
                        address,
                        length,
                        rkey: 1,
                    },
                }
            }
            Self::Withdraw {
                to,
                serial,
                position,
                is_final,
            } => {
                let (stream, theirs) = find(streams, to);
                Record::Withdraw {
                    theirs,
                    withdrawal: Withdrawal {
                        serial,
                        position: position.of(stream.map_or(0, |s| sent(s))),
                        is_final,
                    },
                }
            }
            Self::Placed { to, tail } => {
                let (stream, theirs) = find(streams, to);
                Record::Placed {
                    theirs,
                    serial: 1,
                    tail: tail.of(stream.map_or(0, |s| s.told)),
                }
            }
            Self::Source {
                to,
                position,
                address,
                length,
            } => {
                let (stream, theirs) = find(streams, to);
                Record::Source {
                    theirs,
                    memory: Memory {
                        serial: length,
                        position: position.of(stream.map_or(0, |s| s.told)),
                        address,
                        length,
                        rkey: 1,
                    },
                }
            }
            Self::Taken { to, serial, tail } => {
                let (stream, theirs) = find(streams, to);
                let tail = tail.of(stream.map_or(0, |s| sent(s)));
                Record::Taken { theirs, serial, tail }
            }
        };
        out.push(&record);
    }
}

/// Returns the number of bytes that this end has sent on a stream.
fn sent(stream: &Stream) -> u64 {
    stream.producer.as_ref().map_or(0, |p| p.position())
}
