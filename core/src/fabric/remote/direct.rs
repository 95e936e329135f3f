//! Direct transfers of one direction: what an end knows of a buffer that its own program waits with, and of one that
//! the peer's program waits with (docs/protocol.md, P90–P95). Positions are exact: a buffer stands for the bytes from
//! the position at which its ring was empty, and is used if the sender has told nothing beyond that, and else not at
//! all; or by this end's own device, for what the sender lends from that position on (P97). Pure; not what is posted
//! (`pump/direct.rs`, `taking.rs`), nor the queue pair for it (`bulk.rs`).

use crate::fabric::remote::fault::Breach;
use crate::fabric::remote::qp::Key;
use crate::fabric::remote::record::{Memory, Serial, Withdrawal};

/// A buffer that our program waits with.
#[derive(Clone, Copy, Debug)]
pub struct Buffer {
    /// Where it is.
    pub address: u64,
    /// Bytes.
    pub length: u32,
    /// As which it is registered.
    pub key: Key,
}

/// How far it is with a buffer of our program's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// The peer is to be told of it.
    Untold,
    Told,
    /// The peer was told that it is withdrawn, and will answer.
    Withdrawn,
    /// Nothing comes from the peer: it does not know of it, or lends memory instead. Our device may read from there
    /// into it (`loan.rs`): so much was asked for, so much has come, and no more is asked for.
    Own {
        asked: u64,
        come: u64,
        is_ending: bool,
    },
}

/// A buffer of our program's, while it waits with that.
#[derive(Clone, Copy, Debug)]
struct Landing {
    advert: Memory,
    /// By which our device reaches it.
    key: u32,
    stage: Stage,
}

/// What has become of a buffer of ours.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Landed {
    /// It is open.
    Waits,
    /// It is over, with so many bytes in the buffer, which the ring counts as its next ones and does not have. The
    /// peer's device has written them.
    Over(u64),
    /// The same, but that ours has read them.
    Read(u64),
}

/// Where bytes are to go that our device reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Spot {
    pub serial: Serial,
    pub address: u64,
    pub key: u32,
    /// Bytes that fit there.
    pub room: u64,
}

/// The receiving side: at most one buffer is open.
#[derive(Debug, Default)]
pub(super) struct Landings {
    open: Option<Landing>,
    over: Option<(Serial, Landed)>,
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

    /// The peer may answer one.
    pub fn may_be_answered(&self) -> bool {
        let is_theirs = |landing: Landing| !matches!(landing.stage, Stage::Own { .. });
        self.open.is_some_and(is_theirs) || self.owed.is_some()
    }

    /// One that the peer is to hear of.
    pub fn begin(&mut self, advert: Memory, key: u32) {
        let stage = Stage::Untold;
        self.open = Some(Landing { advert, key, stage });
    }

    fn in_stage(&self, stage: Stage) -> Option<Memory> {
        self.open.filter(|l| l.stage == stage).map(|l| l.advert)
    }

    fn put_stage(&mut self, stage: Stage) {
        if let Some(landing) = &mut self.open {
            landing.stage = stage;
        }
    }

    /// The advert that the peer is to be told of.
    pub fn untold(&self) -> Option<Memory> {
        self.in_stage(Stage::Untold)
    }

    pub fn on_told(&mut self) {
        self.put_stage(Stage::Told);
    }

    /// The withdrawal that the peer is to be told of.
    pub fn withdrawal(&self) -> Option<Withdrawal> {
        self.withdrawal
    }

    pub fn on_withdrawal_told(&mut self) {
        self.withdrawal = None;
        self.put_stage(Stage::Withdrawn);
    }

    fn close(&mut self, landed: Landed) {
        if let Some(landing) = self.open.take() {
            self.over = Some((landing.advert.serial, landed));
        }
    }

    /// Bytes have come by the ring: the peer has not used the advert, and never will.
    pub fn on_ring(&mut self) {
        self.owed = self
            .owed
            .or(self.in_stage(Stage::Withdrawn).map(|advert| advert.serial));
        self.close(Landed::Over(0));
        self.withdrawal = None;
    }

    /// The peer lends memory for what the buffer is for: it will not use the advert, and our device reads into the
    /// buffer, if our program still waits with that.
    pub fn on_loan(&mut self) {
        match self.open.map(|landing| landing.stage) {
            Some(Stage::Untold | Stage::Told) if self.withdrawal.is_none() => self.put_stage(Stage::OWN),
            Some(Stage::Own { .. }) => {}
            _ => self.on_ring(),
        }
    }

    /// Where the bytes from a position on are to go that our device reads; `None`: into the ring.
    pub fn spot(&self, position: u64) -> Option<Spot> {
        let Landing { advert, key, stage } = self.open?;
        let Stage::Own { asked, is_ending, .. } = stage else {
            return None;
        };
        let room = u64::from(advert.length) - asked;
        let is_next = !is_ending && advert.position + asked == position && room > 0;
        is_next.then_some(Spot {
            serial: advert.serial,
            address: advert.address + asked,
            key,
            room,
        })
    }

    /// So many bytes were asked for, for the [spot](Self::spot).
    pub fn on_asked(&mut self, bytes: u64) {
        if let Some(Stage::Own { asked, .. }) = self.open.as_mut().map(|landing| &mut landing.stage) {
            *asked += bytes;
        }
    }

    /// And have come.
    pub fn on_come(&mut self, serial: Serial, bytes: u64) {
        let open = self.open.as_mut().filter(|landing| landing.advert.serial == serial);
        if let Some(Stage::Own { come, .. }) = open.map(|landing| &mut landing.stage) {
            *come += bytes;
        }
    }

    /// Whether with that one is over that our device has read into, or would have: so many bytes are in the buffer.
    /// There may be more to ask for.
    pub fn end_own(&mut self, has_more: bool) -> Option<u64> {
        let Landing { advert, stage, .. } = self.open?;
        let Stage::Own { asked, come, is_ending } = stage else {
            return None;
        };
        let is_full = asked == u64::from(advert.length);
        let is_over = asked == come && (is_ending || is_full || asked > 0 && !has_more);
        if is_over {
            self.close(Landed::Read(come));
        }
        is_over.then_some(come)
    }

    /// PLACED has come: the direction's new tail, or `None` if nothing is new.
    pub fn on_placed(&mut self, serial: Serial, tail: u64, window: u64) -> Result<Option<u64>, Breach> {
        let Some(Landing { advert, stage, .. }) = self.open.filter(|l| l.advert.serial == serial) else {
            // It was given up before this came.
            self.owed = self.owed.filter(|owed| *owed != serial);
            return Ok(None);
        };
        let is_own = matches!(stage, Stage::Own { .. });
        if is_own || !(advert.position..=advert.end().min(window)).contains(&tail) {
            return Err(Breach::Advert);
        }
        let bytes = tail - advert.position;
        self.close(Landed::Over(bytes));
        self.withdrawal = None;
        Ok((bytes > 0).then_some(tail))
    }

    /// The program waits no longer. PLACED confirms it, unless it is final; or what was asked for has
    /// [come](Self::end_own).
    pub fn withdraw(&mut self, serial: Serial, is_final: bool) {
        let Some(Landing { advert, stage, .. }) = self.open.filter(|l| l.advert.serial == serial) else {
            return;
        };
        match stage {
            Stage::Untold => self.close(Landed::Over(0)),
            Stage::Told | Stage::Withdrawn => {
                self.withdrawal = Some(Withdrawal {
                    serial,
                    position: advert.position,
                    is_final,
                });
                if is_final {
                    self.close(Landed::Over(0));
                }
            }
            Stage::Own { .. } => self.end_asking(),
        }
    }

    fn end_asking(&mut self) {
        if let Some(Stage::Own { is_ending, .. }) = self.open.as_mut().map(|landing| &mut landing.stage) {
            *is_ending = true;
        }
    }

    /// Nothing will be placed any more, and nothing that was asked for comes: gives how many bytes had.
    pub fn lapse(&mut self) -> u64 {
        self.owed = None;
        match self.open {
            Some(Landing { advert, stage, .. }) => {
                self.withdraw(advert.serial, true);
                match stage {
                    Stage::Own { come, .. } => {
                        self.close(Landed::Read(come));
                        come
                    }
                    _ => 0,
                }
            }
            None => 0,
        }
    }

    /// The peer has left, and will not answer.
    pub fn on_left(&mut self) {
        match self.open.map(|landing| landing.stage) {
            // Something may still come.
            Some(Stage::Own { .. }) => self.end_asking(),
            _ => self.on_ring(),
        }
        self.owed = None;
    }

    pub fn look(&self, serial: Serial) -> Landed {
        match self.over {
            Some((over, landed)) if over == serial => landed,
            _ if self.open.is_some_and(|l| l.advert.serial == serial) => Landed::Waits,
            _ => Landed::Over(0),
        }
    }
}

impl Stage {
    const OWN: Self = Self::Own {
        asked: 0,
        come: 0,
        is_ending: false,
    };
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
    open: Option<Memory>,
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
    pub fn on_advert(&mut self, advert: Memory, told: u64, is_lent: bool) -> Result<(), Breach> {
        if !advert.is_possible() || advert.position > told || self.written > 0 {
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
    pub fn at(&mut self, told: u64) -> Option<(Memory, u64)> {
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
