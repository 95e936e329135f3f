//! Tests of `HolderPage`.

use std::net::SocketAddr;

use crate::rendezvous::peers::*;

fn tuple(port: u16) -> Tuple {
    let client = SocketAddr::from(([127, 0, 0, 1], port));
    Tuple::new(client, SocketAddr::from(([127, 0, 0, 1], 5432)))
}

fn holder(n: u16) -> InstanceId {
    InstanceId::from_words([n.into(), 7])
}

#[test]
fn the_last_who_said_so_holds_a_connection() {
    let page = HolderPage::new().unwrap();
    assert_eq!(page.holder(&tuple(1)), None);
    page.enter(&tuple(1), &holder(1));
    page.enter(&tuple(2), &holder(2));
    page.enter(&tuple(1), &holder(3));
    assert_eq!(page.holder(&tuple(1)), Some(holder(3)));
    assert_eq!(page.holder(&tuple(2)), Some(holder(2)));
    assert_eq!(page.holder(&tuple(3)), None);
}

#[test]
fn many_connections_are_remembered_and_more_are_never_taken_for_others() {
    let page = HolderPage::new().unwrap();
    (1..=1000).for_each(|n| page.enter(&tuple(n), &holder(n)));
    let found = (1..=1000).filter(|n| page.holder(&tuple(*n)) == Some(holder(*n)));
    assert!(found.count() > 980);
    (1..=50_000).for_each(|n| page.enter(&tuple(n), &holder(n)));
    let wrong = (1..=50_000).filter(|n| page.holder(&tuple(*n)).is_some_and(|h| h != holder(*n)));
    assert_eq!(wrong.count(), 0);
    let found = (1..=50_000).filter(|n| page.holder(&tuple(*n)).is_some());
    assert!(found.count() > BUCKETS);
}

#[test]
fn what_was_half_written_is_not_believed() {
    let page = HolderPage::new().unwrap();
    page.enter(&tuple(1), &holder(1));
    let connection = name_of(&tuple(1));
    let bucket = page.bucket(connection);
    let entry = bucket.iter().find(|e| e.connection.load(Relaxed) == connection);
    entry.unwrap().holder[0].store(99, Relaxed);
    assert_eq!(page.holder(&tuple(1)), None);
}
