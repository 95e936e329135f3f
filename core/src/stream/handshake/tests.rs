//! Tests of the handshake step by step. `explore.rs` explores every order of events.

use crate::stream::handshake::*;

fn nonce() -> Nonce {
    Nonce::random().unwrap()
}

fn pair() -> (Handshake, Handshake) {
    let (nc, ns) = (nonce(), nonce());
    let c = Handshake::connector(nc);
    (c, Handshake::acceptor(ns, nc))
}

fn id() -> InstanceId {
    InstanceId::random().unwrap()
}

#[test]
fn the_whole_handshake_promotes_both_ends() {
    let (mut c, mut s) = pair();
    assert_eq!(c.on_yes(s.mine), Ok(vec![Step::WriteHello]));
    assert_eq!(s.on_hello(id()), Ok(vec![Step::WriteHello]));
    let peer = id();
    assert_eq!(c.on_hello(peer), Ok(vec![Step::NeedLink(peer)]));
    assert_eq!(c.on_link_up(), Ok(vec![Step::SendOpen]));
    assert_eq!(s.on_open(), Ok(vec![Step::SendOpen, Step::Write(Closing::Switch)]));
    // The connector may read the acceptor's SWITCH before its OPEN-ACK, because SWITCH comes by TCP and OPEN-ACK by the
    // link.
    assert_eq!(c.on_closing(Closing::Switch), Ok(vec![Step::ReceiveOnLink]));
    assert_eq!(c.on_open(), Ok(vec![Step::Write(Closing::Switch), Step::Promoted]));
    assert_eq!(
        s.on_closing(Closing::Switch),
        Ok(vec![Step::ReceiveOnLink, Step::Promoted])
    );
}

#[test]
fn a_connector_without_a_link_aborts_and_both_ends_stay_on_tcp() {
    let (mut c, mut s) = pair();
    c.on_yes(s.mine).unwrap();
    s.on_hello(id()).unwrap();
    c.on_hello(id()).unwrap();
    assert_eq!(c.give_up(), [Step::Write(Closing::Abort)]);
    assert_eq!(
        s.on_closing(Closing::Abort),
        Ok(vec![Step::StopScan, Step::Write(Closing::Abort), Step::Abandoned])
    );
    assert_eq!(c.on_closing(Closing::Abort), Ok(vec![Step::StopScan, Step::Abandoned]));
}

#[test]
fn both_giving_up_at_once_ends_cleanly() {
    let (mut c, mut s) = pair();
    c.on_yes(s.mine).unwrap();
    s.on_hello(id()).unwrap();
    c.on_hello(id()).unwrap();
    assert_eq!(c.give_up(), [Step::Write(Closing::Abort)]);
    assert_eq!(s.give_up(), [Step::Write(Closing::Abort)]);
    assert!(c.give_up().is_empty(), "a second marker would be taken for data");
    assert_eq!(c.on_closing(Closing::Abort), Ok(vec![Step::StopScan, Step::Abandoned]));
    assert_eq!(s.on_closing(Closing::Abort), Ok(vec![Step::StopScan, Step::Abandoned]));
}

#[test]
fn a_switch_before_open_is_refused() {
    let (mut c, mut s) = pair();
    c.on_yes(s.mine).unwrap();
    assert!(c.on_closing(Closing::Switch).is_err());
    s.on_hello(id()).unwrap();
    assert!(s.on_closing(Closing::Switch).is_err());
}

#[test]
fn an_abort_that_crosses_a_switch_demotes_the_switched_direction() {
    let (mut c, mut s) = pair();
    c.on_yes(s.mine).unwrap();
    s.on_hello(id()).unwrap();
    c.on_hello(id()).unwrap();
    c.on_link_up().unwrap();
    assert_eq!(s.on_open(), Ok(vec![Step::SendOpen, Step::Write(Closing::Switch)]));
    assert_eq!(c.give_up(), [Step::Write(Closing::Abort)]);
    assert_eq!(c.on_open(), Ok(vec![]), "its answer to our OPEN comes too late");
    assert_eq!(
        c.on_closing(Closing::Switch),
        Ok(vec![Step::ReceiveOnLink, Step::Return])
    );
    assert_eq!(
        s.on_closing(Closing::Abort),
        Ok(vec![Step::StopScan, Step::Demote, Step::Abandoned])
    );
}

#[test]
fn an_acceptor_that_cannot_answer_open_aborts() {
    let (mut c, mut s) = pair();
    c.on_yes(s.mine).unwrap();
    s.on_hello(id()).unwrap();
    c.on_hello(id()).unwrap();
    c.on_link_up().unwrap();
    s.on_open().unwrap();
    assert_eq!(s.on_open_failed(), [Step::Write(Closing::Abort)]);
    assert_eq!(
        c.on_closing(Closing::Abort),
        Ok(vec![Step::StopScan, Step::Write(Closing::Abort), Step::Abandoned])
    );
    assert_eq!(s.on_closing(Closing::Abort), Ok(vec![Step::StopScan, Step::Abandoned]));
}

#[test]
fn the_end_of_tcp_closes_for_the_other() {
    let (mut c, mut s) = pair();
    assert!(c.on_end().is_empty(), "nothing is in TCP yet");
    c.on_yes(s.mine).unwrap();
    assert_eq!(s.clone().on_end(), [Step::StopScan, Step::Abandoned]);
    s.on_hello(id()).unwrap();
    assert_eq!(
        c.on_end(),
        [Step::StopScan, Step::Write(Closing::Abort), Step::Abandoned]
    );
    assert_eq!(
        s.on_end(),
        [Step::StopScan, Step::Write(Closing::Abort), Step::Abandoned]
    );
}

#[test]
fn an_offerer_that_cannot_read_the_greeting_says_so() {
    let (_, mut s) = pair();
    assert_eq!(s.on_bad_marker(), [Step::Write(Closing::Abort)]);
    assert_eq!(s.on_closing(Closing::Abort), Ok(vec![Step::StopScan, Step::Abandoned]));
}
