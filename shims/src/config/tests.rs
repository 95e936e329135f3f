//! Tests of the configuration as a whole.

use std::time::Duration;

use proptest::prelude::*;
use tracing::level_filters::LevelFilter;

use crate::config::*;

fn parse(vars: &[(&str, &str)]) -> (Config, Vec<String>) {
    let vars = vars.iter().map(|(name, value)| (name.into(), value.into()));
    let (config, warnings) = Config::from_vars(vars);
    (config, warnings.iter().map(ToString::to_string).collect())
}

#[test]
fn every_default_in_the_table_is_the_default() {
    for variable in VARIABLES.iter().filter(|v| {
        // The defaults of these variables are descriptions, not values.
        ![
            "RDMASOCK_LOG_FILE",
            "RDMASOCK_RULES",
            "RDMASOCK_SECRET_FILE",
            "RDMASOCK_LIBRARY",
        ]
        .contains(&v.name)
    }) {
        let mut config = Config::default();
        assert_eq!((variable.set)(&mut config, variable.default.as_ref()), Some(()));
        assert_eq!(config, Config::default(), "{}", variable.name);
    }
}

#[test]
fn every_variable_is_read() {
    let (config, warnings) = parse(&[
        ("RDMASOCK", "off"),
        ("RDMASOCK_FABRICS", "shm,shm"),
        ("RDMASOCK_LOG", "debug"),
        ("RDMASOCK_LOG_FILE", "/tmp/log.%p"),
        ("RDMASOCK_PROMOTE_AFTER", "0"),
        ("RDMASOCK_SPIN_US", "0"),
        ("RDMASOCK_RING_MIN", "8k"),
        ("RDMASOCK_RING_MAX", "64M"),
        ("RDMASOCK_ARENA", "64G"),
        ("RDMASOCK_ZCOPY_MIN", "64K"),
        ("RDMASOCK_ALLOC", "registered"),
        ("RDMASOCK_RULES", "rules.toml"),
        ("RDMASOCK_IO_URING", "allow"),
        ("RDMASOCK_EXEC", "leave"),
        ("RDMASOCK_CONTROL_PORT", "0"),
        ("RDMASOCK_SECRET_FILE", "secret"),
        ("RDMASOCK_LIBRARY", "elsewhere.so"),
        ("RDMASOCK_DEV_PRETEND_RDMA", "10.0.0.0/8, fd00::/8"),
        ("RDMASOCK_DEV_LOCAL_DEVICE", "device.so"),
        ("RDMASOCK_DEV_SYS_CLASS", "class"),
        ("RDMASOCK_DEV_WAY", "get"),
    ]);
    assert_eq!(warnings, Vec::<String>::new());
    let expected = Config {
        enabled: false,
        fabrics: Fabrics::SHM,
        log: Targets::new().with_default(LevelFilter::DEBUG),
        log_file: Some("/tmp/log.%p".into()),
        promote_after: Threshold::AT_ONCE,
        spin: Duration::ZERO,
        ring_min: Size::kib(8),
        ring_max: Size::mib(64),
        arena: Size::gib(64),
        zcopy: ZeroCopy::From(Size::kib(64)),
        alloc: Alloc::Registered,
        rules: Some("rules.toml".into()),
        io_uring: IoUring::Allow,
        on_exec: OnExec::Leave,
        control_port: 0,
        secret_file: Some("secret".into()),
        pretend_rdma: vec!["10.0.0.0/8".parse().unwrap(), "fd00::/8".parse().unwrap()],
        local_device: Some("device.so".into()),
        sys_class: Some(c"class".into()),
        way: Some(Way::Get),
    };
    assert_eq!(config, expected);
}

#[test]
fn a_bad_value_is_named_and_the_default_used() {
    for (name, value) in [
        ("RDMASOCK_FABRICS", "shm,ether"),
        ("RDMASOCK_LOG", "loud"),
        ("RDMASOCK_PROMOTE_AFTER", "soon"),
        ("RDMASOCK_SPIN_US", "10001"),
        ("RDMASOCK_RING_MIN", "2K"),
        ("RDMASOCK_RING_MIN", "5000"),
        ("RDMASOCK_RING_MAX", "128M"),
        ("RDMASOCK_ARENA", "8M"),
        ("RDMASOCK_ZCOPY_MIN", "1K"),
        ("RDMASOCK_ZCOPY_MIN", "on"),
        ("RDMASOCK_ALLOC", "on"),
        ("RDMASOCK_IO_URING", "on"),
        ("RDMASOCK_CONTROL_PORT", "65536"),
        ("RDMASOCK_CONTROL_PORT", "-1"),
    ] {
        let (config, warnings) = parse(&[(name, value)]);
        assert_eq!(config, Config::default());
        let variable = VARIABLES.iter().find(|v| v.name == name).unwrap();
        let [line] = warnings.as_slice() else {
            panic!("one line, not {warnings:?}");
        };
        for part in [&format!("{name}={value}"), variable.accepts, variable.default] {
            assert!(line.contains(part), "{line}");
        }
    }
}

#[test]
fn the_main_switch_is_on_only_if_plainly_so() {
    for (values, is_on, warned) in [
        (&["on", "1", "yes", "true", "ON", "True"][..], true, 0),
        (&["off", "0", "no", "false", "OFF", "No"], false, 0),
        (
            &["", " on", "of", "disabled", "2", "-1", "on off", "\u{1f4a5}"],
            false,
            1,
        ),
    ] {
        for value in values {
            let (config, warnings) = parse(&[("RDMASOCK", value)]);
            assert_eq!(
                (config.enabled, warnings.len()),
                (is_on, warned),
                "{value:?}: {warnings:?}"
            );
            assert!(
                warnings.iter().all(|line| line.ends_with("; using off")),
                "{warnings:?}"
            );
        }
    }
    assert!(parse(&[]).0.enabled);
}

#[test]
fn a_ring_is_at_most_as_large_as_what_holds_it() {
    let (config, warnings) = parse(&[("RDMASOCK_RING_MIN", "8M")]);
    assert_eq!((config.ring_min, warnings.len()), (Size::mib(4), 0));
    let (config, warnings) = parse(&[("RDMASOCK_RING_MAX", "64M"), ("RDMASOCK_ARENA", "16M")]);
    assert_eq!((config.ring_max, warnings.len()), (Size::mib(16), 0));
}

#[test]
fn unknown_names_are_told_and_others_left_alone() {
    let (config, warnings) = parse(&[
        ("RDMASOCK_SPINUS", "5"),
        ("RDMASOCKET", "x"),
        ("PATH", "x"),
        ("RDMASOCK_LOG", ""),
    ]);
    assert_eq!(config, Config::default());
    assert_eq!(
        warnings,
        ["RDMASOCK_SPINUS is not a variable of rdmasock (RDMASOCK_SPIN_US is); it is ignored"]
    );
}

proptest! {
    #[test]
    fn any_value_gives_a_valid_configuration_and_messages_of_one_line(
        which in 0..VARIABLES.len(),
        value in "\\PC*|\n[0-9]{1,9}[KMG]|[a-z=,]{0,200}",
    ) {
        let (config, warnings) = parse(&[(VARIABLES[which].name, &value)]);
        prop_assert!(config.ring_min <= config.ring_max && config.ring_max <= config.arena);
        prop_assert!(warnings.iter().all(|line| !line.contains('\n') && line.len() < 2000));
    }
}
