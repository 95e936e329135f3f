//! Tests of the table of modes: every move, and that the table in the module's documentation agrees.

use crate::stream::mode::*;

const EVENTS: [Move; 10] = [
    Move::Announced,
    Move::Expected,
    Move::Switched,
    Move::Settled,
    Move::Left,
    Move::Retained,
    Move::Abandoned,
    Move::Inherited,
    Move::Reclaimed,
    Move::Closed,
];

/// Returns every move of the table.
fn table() -> impl Iterator<Item = (Mode, Move, Mode)> {
    EVENTS.iter().flat_map(|event| {
        let (from, to) = event.moves();
        from.iter().map(move |from| (*from, *event, to))
    })
}

#[test]
fn a_cell_goes_where_the_table_says() {
    for (from, event, to) in table() {
        let cell = ModeCell::default();
        assert_eq!(cell.load(Ordering::Relaxed), Tcp);
        let to_get_there: &[Move] = match from {
            Tcp => &[],
            Marked => &[Move::Expected],
            Link => &[Move::Announced, Move::Switched],
            Foreign => &[Move::Inherited],
        };
        to_get_there.iter().for_each(|step| cell.go(*step));
        assert_eq!(cell.load(Ordering::Relaxed), from);
        cell.go(event);
        assert_eq!(cell.load(Ordering::Relaxed), to, "{event:?} from {from:?}");
    }
}

#[test]
fn a_link_is_entered_by_switch_alone() {
    for (from, event, to) in table() {
        let enters = from != Link && to == Link;
        assert_eq!(enters, event == Move::Switched);
    }
}

#[test]
fn what_another_process_has_is_moved_by_no_marker() {
    for (from, event, to) in table() {
        let may = [Move::Reclaimed, Move::Closed].contains(&event);
        assert!(from != Foreign || to == Foreign || may);
    }
}

#[test]
fn the_pages_table_is_this_one() {
    let text = include_str!("../mode.rs");
    let name = |mode: &Mode| format!("{mode:?}").to_uppercase();
    for event in EVENTS {
        let (from, to) = event.moves();
        let from = match from.len() {
            4 => "any".into(),
            _ => from.iter().map(name).collect::<Vec<_>>().join(", "),
        };
        let row = format!("//! | {from} | [`{event:?}`](Move::{event:?}) | {} |", name(&to));
        assert!(text.contains(&row), "{event:?}");
    }
}
