//! The state of loans: memory of a sending program that the reader's device reads into the reader's ring
//! (docs/protocol.md, P96–P99). Exact as direct transfers are (`direct.rs`): while a loan is open no other record of
//! the direction is sent. TAKEN says up to which position the bytes went by the loan. Pure: `taking.rs` has the
//! engine's part.

use super::fault::Breach;
use super::record::{Memory, Serial};

#[derive(Clone, Copy, Debug)]
struct Lent {
    loan: Memory,
    is_told: bool,
    recall: Recall,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Recall {
    No,
    /// RECALL is to be sent.
    Due,
    Told,
}

/// The sending side of loans; at most one is open, until TAKEN has come for it.
#[derive(Debug, Default)]
pub(super) struct Loans(Option<Lent>);

impl Loans {
    /// Returns whether a loan is open; the direction goes on when it is over.
    pub fn is_open(&self) -> bool {
        self.0.is_some()
    }

    pub fn begin(&mut self, loan: Memory) {
        self.0 = Some(Lent {
            loan,
            is_told: false,
            recall: Recall::No,
        });
    }

    /// Returns the loan for which SOURCE is to be sent.
    pub fn untold(&self) -> Option<Memory> {
        self.0.filter(|lent| !lent.is_told).map(|lent| lent.loan)
    }

    pub fn on_told(&mut self) {
        if let Some(lent) = &mut self.0 {
            lent.is_told = true;
        }
    }

    /// Returns the position up to which the peer may have read; `None` if SOURCE was not sent.
    pub fn reach(&self) -> Option<u64> {
        self.0.filter(|lent| lent.is_told).map(|lent| lent.loan.end())
    }

    /// Recalls the loan: the local program waits no longer. If SOURCE was not sent, the loan ends at once. True if
    /// there was a loan that was not recalled before.
    pub fn recall(&mut self) -> bool {
        match &mut self.0 {
            Some(lent) if lent.is_told => {
                let is_news = lent.recall == Recall::No;
                if is_news {
                    lent.recall = Recall::Due;
                }
                is_news
            }
            _ => self.0.take().is_some(),
        }
    }

    /// Returns the loan for which RECALL is to be sent.
    pub fn recalled(&self) -> Option<Serial> {
        let due = self.0.filter(|lent| lent.recall == Recall::Due);
        due.map(|lent| lent.loan.serial)
    }

    pub fn on_recall_told(&mut self) {
        if let Some(lent) = &mut self.0 {
            lent.recall = Recall::Told;
        }
    }

    /// Takes in TAKEN: the loan is over, and the direction goes on at `tail`. An error if that is outside the loan, or
    /// before `head`, the position up to which the peer's program has read. Returns how many bytes went by the loan.
    pub fn on_taken(&mut self, serial: Serial, tail: u64, head: u64) -> Result<u64, Breach> {
        let told = self.0.filter(|lent| lent.is_told && lent.loan.serial == serial);
        let loan = told.ok_or(Breach::Loan)?.loan;
        if !(loan.position.max(head)..=loan.end()).contains(&tail) {
            return Err(Breach::Loan);
        }
        self.0 = None;
        Ok(tail - loan.position)
    }
}

/// The next bytes to be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Piece {
    /// The position of the first byte.
    pub position: u64,
    pub length: u64,
    /// Their address in the peer's process, and the key.
    pub address: u64,
    pub rkey: u32,
}

#[derive(Clone, Copy, Debug)]
struct Taking {
    loan: Memory,
    /// READs are posted for all bytes before this position.
    posted: u64,
    /// Bytes before this position that are not in the ring are, or were, in the local program's buffer.
    landed: u64,
    /// No more READs are posted for the loan.
    is_ending: bool,
}

/// The reading side of loans; at most one is open, until TAKEN is sent.
#[derive(Debug, Default)]
pub(super) struct Takings(Option<Taking>);

impl Takings {
    /// Returns whether a loan is open. A correct peer then sends no other data of the direction.
    pub fn is_open(&self) -> bool {
        self.0.is_some()
    }

    /// Takes in a loan for the bytes that follow `tail`. The ring has room up to `window`.
    pub fn begin(&mut self, loan: Memory, tail: u64, window: u64) -> Result<(), Breach> {
        if !loan.is_possible() || self.is_open() || loan.position != tail || loan.end() > window {
            return Err(Breach::Loan);
        }
        self.0 = Some(Taking {
            loan,
            posted: tail,
            landed: 0,
            is_ending: false,
        });
        Ok(())
    }

    /// Returns the next bytes to be read; `None` if there are no more.
    pub fn next(&self) -> Option<Piece> {
        let Taking { loan, posted, .. } = self.0.filter(|taking| !taking.is_ending)?;
        let length = loan.end() - posted;
        (length > 0).then_some(Piece {
            position: posted,
            length,
            address: loan.address + (posted - loan.position),
            rkey: loan.rkey,
        })
    }

    pub fn on_posted(&mut self, bytes: u64) {
        if let Some(taking) = &mut self.0 {
            taking.posted += bytes;
        }
    }

    /// Posts no more READs for the loan.
    pub fn stop(&mut self) {
        if let Some(taking) = &mut self.0 {
            taking.is_ending = true;
        }
    }

    /// Takes in a RECALL.
    pub fn on_recall(&mut self, serial: Serial) {
        if self.0.is_some_and(|taking| taking.loan.serial == serial) {
            self.stop();
        }
    }

    /// Returns whether posted READs may still bring bytes; all before `tail` have come.
    pub fn is_under_way(&self, tail: u64) -> bool {
        self.0.is_some_and(|taking| taking.posted > tail)
    }

    /// Ends the READs: bytes that have not come by now never will.
    pub fn on_ended(&mut self, tail: u64) {
        if let Some(taking) = &mut self.0 {
            taking.is_ending = true;
            taking.posted = tail;
        }
    }

    /// Records that bytes up to `tail` are in the local program's buffer. The program is about to take them, and TAKEN
    /// waits for that, so that the peer need not keep them.
    pub fn on_landed(&mut self, tail: u64) {
        if let Some(taking) = &mut self.0 {
            taking.landed = tail;
        }
    }

    /// Returns the serial for TAKEN once no more bytes can come: all READs have brought their bytes, up to `tail`. The
    /// local program has read up to `head`.
    pub fn answer(&self, tail: u64, head: u64) -> Option<Serial> {
        let Taking {
            loan,
            posted,
            landed,
            is_ending,
        } = self.0?;
        let is_over = posted == tail && (is_ending || tail == loan.end() && head >= landed);
        is_over.then_some(loan.serial)
    }

    pub fn on_answered(&mut self) {
        self.0 = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOAN: Memory = Memory {
        serial: 7,
        position: 100,
        address: 5000,
        length: 50,
        rkey: 3,
    };

    #[test]
    fn what_was_told_is_over_with_its_answer_alone() {
        let mut loans = Loans::default();
        loans.begin(LOAN);
        assert_eq!((loans.untold(), loans.reach()), (Some(LOAN), None));
        assert_eq!(loans.on_taken(7, 150, 0), Err(Breach::Loan), "it was not told");
        loans.on_told();
        assert_eq!((loans.untold(), loans.reach()), (None, Some(150)));
        for (serial, tail, head) in [(8, 120, 100), (7, 99, 100), (7, 151, 100), (7, 110, 111)] {
            assert_eq!(loans.on_taken(serial, tail, head), Err(Breach::Loan));
        }
        assert!(loans.recall() && !loans.recall() && loans.is_open());
        assert_eq!(loans.recalled(), Some(7));
        loans.on_recall_told();
        assert!(loans.recalled().is_none() && !loans.recall());
        assert_eq!(loans.on_taken(7, 120, 110), Ok(20));
        assert!(!loans.is_open());
        assert_eq!(loans.on_taken(7, 120, 110), Err(Breach::Loan), "twice");
    }

    #[test]
    fn what_was_not_told_is_over_with_its_recall() {
        let mut loans = Loans::default();
        loans.begin(LOAN);
        assert!(loans.recall());
        assert!(!loans.is_open() && loans.recalled().is_none() && !loans.recall());
    }

    #[test]
    fn memory_is_lent_for_what_comes_next_and_as_far_as_there_is_room() {
        let bad = [
            (Memory { length: 0, ..LOAN }, 100, 1000),
            (
                Memory {
                    address: u64::MAX - 10,
                    ..LOAN
                },
                100,
                1000,
            ),
            (LOAN, 99, 1000),
            (LOAN, 101, 1000),
            (LOAN, 100, 149),
        ];
        for (loan, tail, window) in bad {
            assert_eq!(
                Takings::default().begin(loan, tail, window),
                Err(Breach::Loan),
                "{loan:?}"
            );
        }
        let mut takings = Takings::default();
        assert_eq!(takings.begin(LOAN, 100, 150), Ok(()));
        assert_eq!(takings.begin(LOAN, 100, 150), Err(Breach::Loan), "one at a time");
    }

    #[test]
    fn it_is_answered_when_nothing_can_come_any_more() {
        let mut takings = Takings::default();
        takings.begin(LOAN, 100, 150).unwrap();
        let next = |takings: &Takings| {
            takings
                .next()
                .map(|piece| (piece.position, piece.length, piece.address))
        };
        assert_eq!(next(&takings), Some((100, 50, 5000)));
        takings.on_posted(20);
        assert_eq!(next(&takings), Some((120, 30, 5020)));
        takings.on_recall(6);
        assert!(next(&takings).is_some(), "another one's");
        takings.on_recall(7);
        assert_eq!(
            (next(&takings), takings.answer(100, 0), takings.answer(110, 0)),
            (None, None, None)
        );
        assert!(takings.is_under_way(119) && !takings.is_under_way(120));
        assert_eq!(takings.answer(120, 0), Some(7));
        takings.on_ended(110);
        assert_eq!(takings.answer(110, 0), Some(7));
        takings.on_answered();
        assert!(!takings.is_open() && takings.answer(110, 0).is_none());
    }
}
