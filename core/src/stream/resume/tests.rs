//! Tests of the exchange of RESUME step by step. `explore.rs` explores every order of events.

use crate::stream::resume::*;

fn promoted() -> Resume {
    let mut r = Resume::default();
    assert!(r.on_sent(Closing::Switch).is_empty());
    assert!(r.on_got(Closing::Switch).is_empty());
    r
}

#[test]
fn after_a_failure_each_end_says_where_it_stands_and_sends_from_where_the_other_does() {
    let mut r = promoted();
    assert_eq!(r.on_link_failed(false), [Step::WriteResume]);
    assert!(r.is_suspended() && r.is_next() && r.wrote);
    assert_eq!(
        r.on_resume(7, 9),
        Ok(vec![Step::SendFrom(7), Step::ReadOn(9), Step::Done])
    );
    assert!(r.is_over() && !r.is_suspended() && !r.is_next());
    assert!(r.on_link_failed(false).is_empty() && r.leave_at_once().is_empty());
}

#[test]
fn an_end_that_has_not_noticed_learns_of_the_failure_from_resume() {
    let mut r = promoted();
    let all = vec![Step::WriteResume, Step::SendFrom(0), Step::ReadOn(0), Step::Done];
    assert_eq!(r.on_resume(0, 0), Ok(all));
    assert_eq!(r.on_resume(0, 0), Err(Misplaced("RESUME")));
}

#[test]
fn to_leave_a_link_that_works_is_to_ask_first() {
    let mut r = promoted();
    assert_eq!(r.leave(), [Step::Ask]);
    assert!(r.leave().is_empty());
    assert!(!r.wrote, "what is on its way still comes");
    assert_eq!(r.clone().on_link_failed(false), [Step::WriteResume]);
    assert_eq!(r.clone().leave_at_once(), [Step::WriteResume]);
    assert_eq!(r.on_resume(3, 3).unwrap()[0], Step::WriteResume);
}

#[test]
fn shutdown_ends_tcp_only_after_what_has_to_precede_it() {
    let mut r = promoted();
    assert_eq!(r.shut(), [Step::Ask]);
    assert!(r.shut().is_empty());
    let all = vec![
        Step::WriteResume,
        Step::SendFrom(5),
        Step::ReadOn(6),
        Step::EndTcp,
        Step::Done,
    ];
    assert_eq!(r.on_resume(5, 6), Ok(all));
}

#[test]
fn close_needs_no_resume_if_all_is_confirmed() {
    let mut r = promoted();
    assert_eq!(r.close(), [Step::Mark]);
    assert_eq!(r.clone().on_confirmed(), [Step::EndTcp, Step::Done]);
    assert_eq!(r.on_link_failed(false), [Step::WriteResume]);
    assert!(r.on_confirmed().is_empty(), "RESUME is out: it counts");
    let all = vec![Step::SendFrom(1), Step::ReadOn(0), Step::EndTcp, Step::Done];
    assert_eq!(r.on_resume(1, 0), Ok(all));
}

#[test]
fn a_failure_behind_the_mark_waits_for_switch_and_no_longer() {
    let mut r = Resume::default();
    assert!(r.on_sent(Closing::Switch).is_empty());
    assert!(r.on_link_failed(true).is_empty(), "what TCP has may be lost by a reset");
    assert!(r.looks_ahead() && !r.wrote);
    assert_eq!(r.clone().on_got(Closing::Switch), [Step::WriteResume]);
    let seen = Ahead::Closing(Closing::Switch);
    assert_eq!(r.clone().on_ahead(seen), Ok(vec![Step::WriteResume]));
    assert_eq!(r.clone().on_ahead(Ahead::End), Ok(vec![Step::SendNothing]));
    assert!(r.close().is_empty(), "no mark on a link that has failed");
    assert_eq!(promoted().on_link_failed(true), [Step::WriteResume]);
}

#[test]
fn a_direction_that_was_switched_alone_comes_back_at_once() {
    let mut w = Resume::default();
    assert!(w.on_sent(Closing::Switch).is_empty());
    assert_eq!(w.on_got(Closing::Abort), [Step::WriteResume]);
    assert!(w.is_expecting() && !w.is_next(), "data may precede it");
    assert!(w.clone().on_resume(2, 1).is_err(), "nothing was switched");
    assert_eq!(
        w.on_resume(2, 0),
        Ok(vec![Step::SendFrom(2), Step::ReadOn(0), Step::Done])
    );

    let mut r = Resume::default();
    assert!(r.on_got(Closing::Switch).is_empty());
    assert_eq!(r.on_sent(Closing::Abort), [Step::WriteResume]);
    assert!(r.is_next() && !r.is_suspended());
    assert!(r.clone().on_resume(1, 4).is_err(), "nothing was switched");
    assert_eq!(r.on_resume(0, 4), Ok(vec![Step::ReadOn(4), Step::Done]));
}

#[test]
fn an_attempt_that_both_abort_needs_nothing() {
    let mut r = Resume::default();
    assert!(r.shut().is_empty(), "the other may have switched");
    assert!(r.on_sent(Closing::Abort).is_empty());
    assert_eq!(r.on_got(Closing::Abort), [Step::EndTcp, Step::Done]);
    assert!(r.on_resume(0, 0).is_err());
}

#[test]
fn the_end_of_tcp_in_place_of_resume_is_a_reset_unless_all_is_there() {
    let mut r = promoted();
    assert_eq!(r.clone().on_end(false), [Step::Lost, Step::SendNothing, Step::Done]);
    assert_eq!(r.clone().on_end(true), [Step::ReadOn(0), Step::SendNothing, Step::Done]);
    r.on_resume(0, 0).unwrap();
    assert!(r.on_end(false).is_empty(), "TCP's own end");
}
