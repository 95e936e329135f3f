use crate::config::ways::*;

fn auto(costs: &Costs, is_registered: bool) -> usize {
    threshold(ZeroCopy::Auto, costs, is_registered)
}

#[test]
fn threshold_is_lower_for_registered_memory() {
    let costs = Costs::default();
    assert_eq!(auto(&costs, false), 128_000);
    assert_eq!(auto(&costs, true), 30_720);
}

#[test]
fn threshold_follows_what_registrations_cost() {
    let costs = Costs::default();
    for _ in 0..100 {
        costs.on_registered(1 << 20, 500);
    }
    assert!((50_000..60_000).contains(&auto(&costs, false)));
    for _ in 0..100 {
        costs.on_registered(1 << 20, 45_000);
    }
    assert!(
        (300_000..400_000).contains(&auto(&costs, false)),
        "{}",
        auto(&costs, false)
    );
    costs.reset();
    assert_eq!(auto(&costs, false), 128_000);
}

#[test]
fn threshold_is_bounded_whatever_is_measured() {
    let costs = Costs::default();
    for _ in 0..100 {
        costs.on_registered(0, u64::MAX / 4);
    }
    assert_eq!(auto(&costs, false), MOST);
    assert_eq!(auto(&costs, true), 30_720);
    for _ in 0..10 {
        costs.on_registered(1 << 20, 10_000);
    }
    assert!(auto(&costs, false) < MOST);
}
