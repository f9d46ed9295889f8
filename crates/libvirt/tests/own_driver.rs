//! Against the hypervisor that libvirt's library plays by itself (`test:///default`): its domain
//! `test` is there without a daemon, a right or a QEMU.
#![allow(clippy::unwrap_used)]

use std::io::Write;
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};

use godwit_libvirt::{Connection, ErrorKind, LibvirtError, State, Xml};

/// All connections of a process share the one hypervisor.
static ONE: Mutex<()> = Mutex::new(());

/// The library's own hypervisor for one test alone, or a word that there is no library here.
fn host(test: &str) -> Option<(Connection, MutexGuard<'static, ()>)> {
    let one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
    match Connection::open("test:///default") {
        Ok(host) => Some((host, one)),
        Err(error @ LibvirtError::NoLibrary { .. }) => {
            // The test harness does not hold this back.
            let _ = writeln!(std::io::stderr(), "SKIPPED {test}: {error}");
            None
        }
        Err(error) => panic!("{error}"),
    }
}

#[test]
fn a_domain_is_found_and_described() {
    let Some((host, _one)) = host("a_domain_is_found_and_described") else { return };
    let domain = host.domain("test").unwrap();
    assert_eq!(domain.name(), "test");
    let again = host.domain_by_uuid(&domain.uuid().unwrap()).unwrap();
    assert_eq!(again.name(), "test");
    assert!(domain.xml(Xml::Migratable).unwrap().contains("<name>test</name>"));
    assert!(domain.xml(Xml::Inactive).unwrap().contains(&domain.uuid().unwrap()));
    let names: Vec<String> = host.domains().unwrap().iter().map(|it| it.name()).collect();
    assert_eq!(names, ["test"]);
    assert!(host.is_alive());
    assert_eq!(host.own_uri().unwrap(), "test:///default");
    assert!(host.daemon_version().unwrap() > 8_002_000);
}

#[test]
fn a_domain_is_stopped_run_and_ended() {
    let Some((host, _one)) = host("a_domain_is_stopped_run_and_ended") else { return };
    let domain = host.domain("test").unwrap();
    assert_eq!(domain.state().unwrap(), State::Running);
    domain.suspend().unwrap();
    assert!(matches!(domain.state().unwrap(), State::Paused(_)));
    domain.resume().unwrap();
    assert_eq!(domain.state().unwrap(), State::Running);
    assert!(domain.is_persistent().unwrap());
    domain.set_autostart(true).unwrap();
    assert!(domain.autostarts().unwrap());
    assert!(!domain.has_managed_save().unwrap());
    assert_eq!((domain.snapshots().unwrap(), domain.checkpoints().unwrap()), (0, 0));
    domain.destroy().unwrap();
    assert_eq!(domain.state().unwrap(), State::ShutOff);
    let xml = domain.xml(Xml::Inactive).unwrap();
    domain.undefine().unwrap();
    assert_eq!(host.domain("test").unwrap_err().kind(), ErrorKind::NoDomain);
    assert_eq!(host.define(&xml).unwrap().state().unwrap(), State::ShutOff);
}

#[test]
fn a_refusal_is_in_libvirts_words_on_one_line() {
    let Some((host, _one)) = host("a_refusal_is_in_libvirts_words_on_one_line") else { return };
    let error = host.domain("nobody").unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NoDomain);
    let told = error.to_string();
    assert!(told.starts_with("libvirt refused to find the domain: Domain not found"), "{told}");
    let error = host.domain("test").unwrap().resume().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Other, "{error}");
    let error = host.restore_paused(Path::new("/nowhere/image")).unwrap_err().to_string();
    assert!(error.contains("restore the domain") && error.lines().count() == 1, "{error}");
    let error = host.domain("a\0b").unwrap_err().to_string();
    assert!(error.contains("NUL"), "{error}");
    let error = host.domain("test").unwrap().monitor("{}", None).unwrap_err().to_string();
    assert!(error.contains("hand a command to QEMU"), "{error}");
    // The library's own hypervisor has no QEMU.
    let (to, heard) = std::sync::mpsc::channel();
    let events = host.domain("test").unwrap().tell_events(to);
    assert!(events.unwrap_err().to_string().contains("tell of QEMU's events"));
    assert!(heard.recv().is_err());
}

#[test]
fn a_daemon_that_is_not_there_is_told_with_its_address() {
    let test = "a_daemon_that_is_not_there_is_told_with_its_address";
    let Some(_one) = host(test) else { return };
    let uri = "qemu+unix:///system?socket=/nowhere/libvirt-sock";
    let told = Connection::open(uri).unwrap_err().to_string();
    assert!(told.starts_with(&format!("cannot connect to libvirt at {uri}: ")), "{told}");
    assert!(told.contains("is its daemon running") && told.lines().count() == 1, "{told}");
}
