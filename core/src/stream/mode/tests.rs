//! Tests of the table of modes: every cell of it, and that the page says the same.

use crate::stream::mode::*;

const SENDING: [Sending; 8] = [
    Sending::Announced,
    Sending::Switched,
    Sending::Flushed,
    Sending::Withdrawn,
    Sending::Left,
    Sending::Inherited,
    Sending::Reclaimed,
    Sending::Closed,
];
const RECEIVING: [Receiving; 9] = [
    Receiving::Expected,
    Receiving::Switched,
    Receiving::Settled,
    Receiving::Left,
    Receiving::Retained,
    Receiving::Abandoned,
    Receiving::Inherited,
    Receiving::Reclaimed,
    Receiving::Closed,
];

/// Returns every move of the table.
fn table<E: Event>(events: &[E]) -> Vec<(Mode, E, Mode)> {
    let moves = events.iter().flat_map(|event| {
        let (from, to) = event.moves();
        from.iter().map(move |from| (*from, *event, to))
    });
    moves.collect()
}

#[test]
fn a_cell_goes_where_the_table_says() {
    fn check<E: Event>(events: &[E], to_get_there: impl Fn(Mode) -> Vec<E>) {
        for (from, event, to) in table(events) {
            let cell = ModeCell::<E>::default();
            for step in to_get_there(from) {
                cell.go(step);
            }
            assert_eq!(cell.load(Ordering::Relaxed), from);
            cell.go(event);
            assert_eq!(cell.load(Ordering::Relaxed), to, "{event:?} from {from:?}");
        }
    }
    check(&SENDING, |mode| match mode {
        Tcp => vec![],
        Marked => vec![Sending::Announced],
        Link => vec![Sending::Announced, Sending::Switched],
        Foreign => vec![Sending::Inherited],
    });
    check(&RECEIVING, |mode| match mode {
        Tcp => vec![],
        Marked => vec![Receiving::Expected],
        Link => vec![Receiving::Expected, Receiving::Switched],
        Foreign => vec![Receiving::Inherited],
    });
}

#[test]
fn a_link_is_entered_by_switch_alone() {
    for (from, event, to) in table(&SENDING) {
        let enters = from != Link && to == Link;
        assert_eq!(enters, event == Sending::Switched);
    }
    for (from, event, to) in table(&RECEIVING) {
        let enters = from != Link && to == Link;
        assert_eq!(enters, event == Receiving::Switched);
    }
}

#[test]
fn what_another_process_has_is_moved_by_no_marker() {
    let leaves = |from: Mode, to: Mode| from == Foreign && to != Foreign;
    for (from, event, to) in table(&SENDING) {
        let may = [Sending::Reclaimed, Sending::Closed].contains(&event);
        assert!(!leaves(from, to) || may);
    }
    for (from, event, to) in table(&RECEIVING) {
        let may = [Receiving::Reclaimed, Receiving::Closed].contains(&event);
        assert!(!leaves(from, to) || may);
    }
}

#[test]
fn the_pages_table_is_this_one() {
    let text = include_str!("../mode.rs");
    let name = |mode: &Mode| format!("{mode:?}").to_uppercase();
    let row = |event: String, (from, to): (&[Mode], Mode)| {
        let from = match from.len() {
            4 => "any".into(),
            _ => from.iter().map(name).collect::<Vec<_>>().join(", "),
        };
        format!("//! | {from} | {event} | {} |", name(&to))
    };
    for event in SENDING {
        let shown = match event {
            Sending::Inherited | Sending::Reclaimed | Sending::Closed => format!("`{event:?}`"),
            _ => format!("[`{event:?}`](Sending::{event:?})"),
        };
        assert!(text.contains(&row(shown, event.moves())), "{event:?}");
    }
    for event in RECEIVING {
        let shown = match event {
            Receiving::Inherited | Receiving::Reclaimed | Receiving::Closed => {
                format!("`{event:?}`")
            }
            _ => format!("[`{event:?}`](Receiving::{event:?})"),
        };
        assert!(text.contains(&row(shown, event.moves())), "{event:?}");
    }
}
