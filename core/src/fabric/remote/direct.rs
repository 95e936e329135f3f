//! Direct transfers of one direction: what an end knows of a buffer that its own program waits with, and of one that
//! the peer's program waits with (docs/protocol.md, P90–P95). Positions are exact: a buffer stands for the bytes from
//! the position at which its ring was empty, and is used if the sender has told nothing beyond that, and else not at
//! all. Pure; not what is posted (`pump/direct.rs`), nor the queue pair for it (`bulk.rs`).

use crate::fabric::remote::fault::Breach;

/// Names one advert of an end's; the next ones are others for a long time.
pub type Serial = u32;

/// What the peer has to know of a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Advert {
    /// Its name.
    pub serial: Serial,
    /// The direction's position that its first byte is at.
    pub position: u64,
    /// Where it is in the process that waits.
    pub address: u64,
    /// Bytes.
    pub length: u32,
    /// By which the peer's device reaches it.
    pub rkey: u32,
}

impl Advert {
    /// The position behind its last byte.
    pub fn end(&self) -> u64 {
        self.position.saturating_add(self.length.into())
    }
}

/// An advert is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Withdrawal {
    pub serial: Serial,
    /// Its position.
    pub position: u64,
    /// Bytes in its buffer that PLACED has not told of count for nothing, and nobody waits for PLACED.
    pub is_final: bool,
}

/// A buffer of our program's, while its advert is open.
#[derive(Clone, Copy, Debug)]
pub(super) struct Landing {
    pub advert: Advert,
    pub is_told: bool,
    /// The peer was told that it is withdrawn, and will answer.
    pub is_withdrawn: bool,
}

/// What has become of an advert of ours.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Landed {
    /// It is open.
    Waits,
    /// It is over, with so many bytes in the buffer, which the ring counts as its next ones and does not have.
    Over(u64),
}

/// The receiving side: at most one advert is open.
#[derive(Debug, Default)]
pub(super) struct Landings {
    open: Option<Landing>,
    over: Option<(Serial, u64)>,
    /// One that is over, but for the peer's answer.
    owed: Option<Serial>,
    /// To be told.
    withdrawal: Option<Withdrawal>,
}

impl Landings {
    /// No other one can be made yet.
    pub fn is_busy(&self) -> bool {
        self.open.is_some() || self.owed.is_some()
    }

    pub fn begin(&mut self, advert: Advert) {
        self.open = Some(Landing {
            advert,
            is_told: false,
            is_withdrawn: false,
        });
    }

    /// The advert that the peer is to be told of.
    pub fn untold(&self) -> Option<Advert> {
        self.open.filter(|l| !l.is_told).map(|l| l.advert)
    }

    pub fn on_told(&mut self) {
        if let Some(landing) = &mut self.open {
            landing.is_told = true;
        }
    }

    /// The withdrawal that the peer is to be told of.
    pub fn withdrawal(&self) -> Option<Withdrawal> {
        self.withdrawal
    }

    pub fn on_withdrawal_told(&mut self) {
        self.withdrawal = None;
        if let Some(landing) = &mut self.open {
            landing.is_withdrawn = true;
        }
    }

    fn close(&mut self, bytes: u64) {
        if let Some(landing) = self.open.take() {
            self.over = Some((landing.advert.serial, bytes));
        }
    }

    /// Bytes have come by the ring: the peer has not used the advert, and never will.
    pub fn on_ring(&mut self) {
        self.owed = self
            .owed
            .or(self.open.filter(|l| l.is_withdrawn).map(|l| l.advert.serial));
        self.close(0);
        self.withdrawal = None;
    }

    /// PLACED has come: the direction's new tail, or `None` if nothing is new.
    pub fn on_placed(&mut self, serial: Serial, tail: u64, window: u64) -> Result<Option<u64>, Breach> {
        let Some(advert) = self.open.map(|l| l.advert).filter(|a| a.serial == serial) else {
            // It was given up before this came.
            self.owed = self.owed.filter(|owed| *owed != serial);
            return Ok(None);
        };
        if !(advert.position..=advert.end().min(window)).contains(&tail) {
            return Err(Breach::Advert);
        }
        let bytes = tail - advert.position;
        self.close(bytes);
        self.withdrawal = None;
        Ok((bytes > 0).then_some(tail))
    }

    /// The program waits no longer. PLACED confirms it, unless it is final.
    pub fn withdraw(&mut self, serial: Serial, is_final: bool) {
        let Some(landing) = self.open.filter(|l| l.advert.serial == serial) else {
            return;
        };
        if landing.is_told {
            self.withdrawal = Some(Withdrawal {
                serial,
                position: landing.advert.position,
                is_final,
            });
        }
        if is_final || !landing.is_told {
            self.close(0);
        }
    }

    /// Nothing will be placed any more.
    pub fn lapse(&mut self) {
        self.owed = None;
        if let Some(landing) = self.open {
            self.withdraw(landing.advert.serial, true);
        }
    }

    /// The peer has left, and will not answer.
    pub fn on_left(&mut self) {
        self.on_ring();
        self.owed = None;
    }

    pub fn look(&self, serial: Serial) -> Landed {
        match self.over {
            Some((over, bytes)) if over == serial => Landed::Over(bytes),
            _ if self.open.is_some_and(|l| l.advert.serial == serial) => Landed::Waits,
            _ => Landed::Over(0),
        }
    }
}

/// Memory of our program's that stands for bytes of the mirror, which does not have them.
#[derive(Clone, Copy, Debug)]
pub(super) struct Source {
    /// Positions that it stands for.
    pub from: u64,
    pub until: u64,
    /// The address of the first.
    pub address: usize,
    /// Under which it is registered.
    pub key: u32,
    /// What is left of it has to go by the ring.
    pub is_needed: bool,
    /// The peer's device reads it (`loan.rs`); else ours writes it into a buffer of the peer's.
    pub is_offered: bool,
}

impl Source {
    pub fn covers(&self, position: u64) -> bool {
        (self.from..self.until).contains(&position)
    }
}

/// What is to be done about an advert.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Answer {
    pub serial: Serial,
    pub tail: u64,
}

/// The sending side.
#[derive(Debug, Default)]
pub(super) struct Targets {
    open: Option<Advert>,
    /// Bytes that were posted to it, and not told.
    written: u64,
    /// The last advert that was answered by PLACED.
    answered: Option<Serial>,
    /// Nothing more is sent before the peer's program has taken all before this.
    held: Option<u64>,
    /// How many adverts have come.
    pub adverts: u32,
    pub source: Option<Source>,
}

impl Targets {
    pub fn on_advert(&mut self, advert: Advert, told: u64, is_lent: bool) -> Result<(), Breach> {
        let is_good = advert.length > 0 && advert.address.checked_add(advert.length.into()).is_some();
        if !is_good || advert.position > told || self.written > 0 {
            return Err(Breach::Advert);
        }
        self.adverts = self.adverts.wrapping_add(1);
        // While memory is lent it goes on by that, and the consumer's end hears so.
        let is_next = advert.position == told && !is_lent;
        self.open = (is_next && self.held.is_none_or(|held| held <= told)).then_some(advert);
        Ok(())
    }

    /// Whether the direction has to wait for the peer's program, which has read up to `head`.
    pub fn holds(&mut self, head: u64) -> bool {
        self.held = self.held.filter(|held| *held > head);
        self.held.is_some()
    }

    /// Up to where, from `position` on and at most `until`, the mirror has the bytes.
    pub fn mirrored(&self, position: u64, until: u64) -> u64 {
        match self.source {
            Some(source) if position < source.until => until.min(source.from.max(position)),
            _ => until,
        }
    }

    /// The advert that the byte at `told` may go to, and how much of it was written.
    pub fn at(&mut self, told: u64) -> Option<(Advert, u64)> {
        self.open = self.open.filter(|advert| advert.position == told);
        self.open.map(|advert| (advert, self.written))
    }

    pub fn on_written(&mut self, bytes: u64) {
        self.written += bytes;
    }

    /// Nothing more goes to it; what was written is told, and the direction goes on behind it.
    pub fn finish(&mut self) -> Option<Answer> {
        let advert = self.open.take()?;
        let tail = advert.position + std::mem::take(&mut self.written);
        self.answered = Some(advert.serial);
        if tail > advert.position {
            self.held = Some(tail);
        }
        Some(Answer {
            serial: advert.serial,
            tail,
        })
    }

    /// What the peer is to be answered; and for a final one, where the direction has to go on again.
    pub fn on_withdrawal(&mut self, withdrawal: Withdrawal) -> (Option<Answer>, Option<u64>) {
        let Withdrawal {
            serial,
            position,
            is_final,
        } = withdrawal;
        let is_open = self.open.is_some_and(|advert| advert.serial == serial);
        if is_final {
            if is_open {
                self.drop_open();
            }
            let again =
                (self.answered == Some(serial) && self.held.is_some_and(|held| held > position)).then_some(position);
            if again.is_some() {
                self.held = None;
            }
            return (None, again);
        }
        if is_open {
            return (self.finish(), None);
        }
        if self.answered == Some(serial) {
            return (None, None);
        }
        self.answered = Some(serial);
        (Some(Answer { serial, tail: position }), None)
    }

    /// Nothing can be written there any more.
    pub fn drop_open(&mut self) {
        self.open = None;
        self.written = 0;
    }
}
