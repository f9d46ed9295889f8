//! Greetings, versions and features.

use godwit_wire::*;

#[test]
fn strangers_are_told_from_versions() {
    let mut ssh = [0; GREETING_LEN];
    ssh[..8].copy_from_slice(b"SSH-2.0-");
    assert!(matches!(Greeting::decode(&ssh), Err(WireError::NotGodwit { .. })));
}

#[test]
fn who_speaks_no_version_of_ours_is_named_with_all_of_its_own() {
    // Whatever else is in its greeting, and even if its checksum is made in another way.
    let greeting = |version, role, oldest| {
        let mut bytes = Greeting::refusal().encode();
        bytes[8..12].copy_from_slice(&[version, 0, role, oldest]);
        bytes
    };
    let ours = Versions { oldest: 5, newest: 6 };
    assert_eq!(Versions::HERE, ours);
    for (version, role, oldest, theirs) in [
        (9, 0, 8, Versions { oldest: 8, newest: 9 }),
        // Before version 6 nothing was there, and on other connections the number of a channel is.
        (4, 0, 0, Versions { oldest: 4, newest: 4 }),
        (9, 1, 3, Versions { oldest: 9, newest: 9 }),
        // No older version than the newest can be newer.
        (4, 0, 7, Versions { oldest: 4, newest: 4 }),
        // It spoke version 6, if it were told to.
        (7, 0, 6, Versions { oldest: 6, newest: 7 }),
    ] {
        let refused = Greeting::decode(&greeting(version, role, oldest));
        assert_eq!(refused, Err(WireError::Version { theirs, ours }));
    }
    let theirs = Versions { oldest: 8, newest: 9 };
    assert_eq!(
        WireError::Version { theirs, ours }.to_string(),
        "the peer speaks versions 8 to 9 of the protocol and this godwit versions 5 to 6: install \
         the same release on both hosts, or releases that have a version in common"
    );
}

#[test]
fn the_newest_common_version_is_spoken() {
    let common = |oldest, newest| Versions { oldest, newest }.common();
    assert_eq!(common(5, 5), Some(Version::V5));
    assert_eq!(common(5, 6), Some(Version::V6));
    assert_eq!(common(6, 9), Some(Version::V6));
    assert_eq!(common(4, 5), Some(Version::V5));
    assert_eq!((common(4, 4), common(7, 9), common(6, 5)), (None, None, None));
}

#[test]
fn a_version_is_spoken_in_every_greeting_and_features_only_since_they_are_there() {
    for version in Version::ALL {
        for role in [Role::Control, Role::Channel(9), Role::Resolve, Role::Resume] {
            let greeting = Greeting { version, session: SessionId([1; 16]), role, attempt: 7 };
            assert_eq!(Greeting::decode(&greeting.encode()), Ok(greeting));
        }
    }
    assert_eq!(Version::V5.features(), Features::NONE);
    assert_eq!(Version::NEWEST.features(), Features::HERE);
}

#[test]
fn features_are_sets_of_bits_that_need_not_be_known() {
    let known = Features::of(Feature::Restart);
    assert_eq!(known, Features(1), "the numbers are the wire's");
    let all = Features(u32::MAX);
    assert_eq!(all.common(known), known);
    assert!(known.is_within(all) && !all.is_within(known) && Features::NONE.is_within(known));
    assert!(all.contains(Feature::Restart) && !Features(!1).contains(Feature::Restart));
    assert_eq!(Features::of(Feature::Proof), Features(2));
    assert_eq!(Features::of(Feature::DiskProof), Features(32));
    let unknown = Features(u32::MAX << Feature::ALL.len());
    assert_eq!((known.to_string(), unknown.to_string()), ("restart".into(), "none".into()));
    assert_eq!(all.without(Feature::DiskProof), Features(!32));
    assert_eq!(known.without(Feature::DiskProof), known);
    assert_eq!(known.with(Feature::PostCopyWanted), Features(1 | 64));
    // Nobody accepts that somebody wants something.
    assert!(!Features::HERE.contains(Feature::PostCopyWanted));
}
