//! Two ends over real sockets: those that belong together, and each way in which they do not.
#![allow(clippy::unwrap_used)]

use std::fs;
use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use godwit_tls::{Files, Host, Keys, Session, Side, TlsError, make};
use rcgen::{
    CertificateParams, CertificateRevocationListParams, Issuer, KeyIdMethod, KeyPair,
    KeyUsagePurpose, RevocationReason, RevokedCertParams, SerialNumber,
};
use time::{Duration, OffsetDateTime};

/// A directory that goes with its value.
struct Dir(PathBuf);

impl Dir {
    fn new() -> Self {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let name = format!("godwit-tls-test-{}-{number}", std::process::id());
        let dir = Self(std::env::temp_dir().join(name));
        fs::create_dir_all(&dir.0).unwrap();
        dir
    }

    fn keys(&self, host: &str, side: Side) -> Keys {
        Keys::read(&Files::in_dir(&self.0.join(host), side).unwrap()).unwrap()
    }
}

impl Drop for Dir {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn names(names: &[&str]) -> Vec<String> {
    names.iter().map(|name| (*name).to_owned()).collect()
}

/// An authority with keys for `west` and `east`.
fn pair() -> Dir {
    let dir = Dir::new();
    make(&dir.0, &names(&["west", "east"]), 30).unwrap();
    dir
}

fn sockets() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let one = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    (one, listener.accept().unwrap().0)
}

/// What both ends make of each other: the source's words when it has read a byte of the
/// destination's, and the destination's when it has begun.
fn meet(source: &Host, destination: &Host) -> (Result<(), String>, Result<(), String>) {
    let (one, other) = sockets();
    std::thread::scope(|scope| {
        let there = scope.spawn(|| {
            let session = destination.session("west:1").unwrap();
            session.begin(&other).map_err(|error| error.to_string())?;
            session.write(&other, b"!").map_err(|error| error.to_string()).map(drop)
        });
        let session = source.session("east:2").unwrap();
        let here = session.begin(&one).and_then(|()| session.read(&one, &mut [0; 1]));
        let here = here.map(drop).map_err(|error| error.to_string());
        drop(one);
        (here, there.join().unwrap())
    })
}

fn hosts(dir: &Dir) -> (Host, Host) {
    let source = Host::source(&dir.keys("west", Side::Source), "east").unwrap();
    let allowed = names(&["north", "west"]);
    let destination = Host::destination(&dir.keys("east", Side::Destination), &allowed).unwrap();
    (source, destination)
}

#[test]
fn what_is_written_is_read_both_ways_at_once() {
    let dir = pair();
    let (source, destination) = hosts(&dir);
    let (one, other) = sockets();
    let bytes: Vec<u8> = (0..3_000_000_u32).flat_map(u32::to_le_bytes).collect();
    let work = |host: &Host, socket: &TcpStream| {
        let session = host.session("peer").unwrap();
        session.begin(socket).unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut rest = &bytes[..];
                while !rest.is_empty() {
                    rest = &rest[session.write(socket, rest).unwrap()..];
                }
                session.finish(socket).unwrap();
            });
            let (mut seen, mut buffer) = (Vec::<u8>::new(), vec![0; 100_000]);
            loop {
                match session.read(socket, &mut buffer).unwrap() {
                    0 => break,
                    n => seen.extend_from_slice(&buffer[..n]),
                }
            }
            assert!(seen == bytes);
        });
        session.shown().unwrap()
    };
    std::thread::scope(|scope| {
        let there = scope.spawn(|| work(&destination, &other));
        let shown = work(&source, &one);
        assert_ne!(shown, there.join().unwrap(), "each has its own certificate");
    });
}

#[test]
fn an_end_that_was_not_announced_is_an_error() {
    let dir = pair();
    let (source, destination) = hosts(&dir);
    let (one, other) = sockets();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let session = destination.session("west").unwrap();
            session.begin(&other).unwrap();
            session.write(&other, b"half of it").unwrap();
            other.shutdown(Shutdown::Write).unwrap();
        });
        let session = source.session("east:2").unwrap();
        session.begin(&one).unwrap();
        let mut buffer = [0; 100];
        assert_eq!(session.read(&one, &mut buffer).unwrap(), 10);
        let error = session.read(&one, &mut buffer).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
        assert!(error.to_string().starts_with("east:2 ended the connection without"), "{error}");
    });
}

#[test]
fn bytes_that_somebody_changed_are_an_error() {
    let dir = pair();
    let (source, destination) = hosts(&dir);
    let (one, near) = sockets();
    let (far, other) = sockets();
    std::thread::scope(|scope| {
        // Between the two, one byte is changed behind the greetings.
        scope.spawn(|| {
            let (mut near, mut far) = (&near, &far);
            let mut passed = 0;
            let mut buffer = vec![0; 4096];
            while let Ok(count @ 1..) = far.read(&mut buffer) {
                passed += count;
                if passed > 50_000 {
                    buffer[count / 2] ^= 1;
                }
                if near.write_all(&buffer[..count]).is_err() {
                    return;
                }
            }
        });
        scope.spawn(|| io::copy(&mut &near, &mut &far));
        scope.spawn(|| {
            let session = destination.session("west").unwrap();
            session.begin(&other).unwrap();
            while session.write(&other, &[7; 4096]).is_ok() {}
        });
        let session = source.session("east:2").unwrap();
        session.begin(&one).unwrap();
        let mut buffer = vec![0; 4096];
        let error = loop {
            match session.read(&one, &mut buffer) {
                Ok(n) => assert!(buffer[..n].iter().all(|byte| *byte == 7), "it was given out"),
                Err(error) => break error,
            }
        };
        assert_eq!(error.kind(), io::ErrorKind::InvalidData, "{error}");
        for socket in [&one, &near, &far, &other] {
            let _ = socket.shutdown(Shutdown::Both);
        }
    });
}

#[test]
fn another_name_is_refused_on_either_side() {
    let dir = pair();
    let (source, destination) = hosts(&dir);
    let south = Host::source(&dir.keys("west", Side::Source), "south").unwrap();
    let (here, _) = meet(&south, &destination);
    let words = here.unwrap_err();
    let expected = "the certificate of east:2 is not made out to 'south', but to";
    assert!(words.starts_with(expected) && words.contains("east"), "{words}");

    let keys = dir.keys("east", Side::Destination);
    let picky = Host::destination(&keys, &names(&["north"])).unwrap();
    let (here, there) = meet(&source, &picky);
    let words = there.unwrap_err();
    let expected = "the certificate of west:1 is not made out to 'north', but to";
    assert!(words.starts_with(expected), "{words}");
    assert!(here.is_err());
    // Without names any of the authority's may come.
    let open = Host::destination(&keys, &[]).unwrap();
    assert_eq!(meet(&source, &open), (Ok(()), Ok(())));
    assert!(matches!(Host::source(&keys, "no name"), Err(TlsError::Name(_))));
}

#[test]
fn another_authority_is_refused_on_both_sides() {
    let (ours, theirs) = (pair(), pair());
    let (source, _) = hosts(&ours);
    let (_, destination) = hosts(&theirs);
    let (here, there) = meet(&source, &destination);
    let words = here.unwrap_err();
    assert!(words.contains("of east:2 is signed by another authority than ours"), "{words}");
    let words = there.unwrap_err();
    assert!(words.contains("west:1 does not take our certificate"), "{words}");
    assert!(words.contains("host-cert.pem): another authority"), "{words}");

    // The source believes the destination, and is not believed.
    let mixed = Files {
        authority: theirs.0.join("ca-cert.pem"),
        ..Files::in_dir(&ours.0.join("west"), Side::Source).unwrap()
    };
    let source = Host::source(&Keys::read(&mixed).unwrap(), "east").unwrap();
    let (here, there) = meet(&source, &destination);
    let words = there.unwrap_err();
    assert!(words.contains("of west:1 is signed by another authority"), "{words}");
    let words = here.unwrap_err();
    assert!(words.contains("east:2 does not take our certificate"), "{words}");
}

/// Keys for `host` in `dir`, by the authority that is there, with `change` to the certificate.
fn other_keys(dir: &Dir, host: &str, change: impl FnOnce(&mut CertificateParams)) {
    let mut params = CertificateParams::new(names(&[host])).unwrap();
    change(&mut params);
    let key = KeyPair::generate().unwrap();
    let signed = params.signed_by(&key, &issuer(dir)).unwrap();
    let home = dir.0.join(host);
    fs::write(home.join("host-cert.pem"), signed.pem()).unwrap();
    fs::write(home.join("host-key.pem"), key.serialize_pem()).unwrap();
}

fn issuer(dir: &Dir) -> Issuer<'static, KeyPair> {
    let pem = fs::read_to_string(dir.0.join("ca-key.pem")).unwrap();
    let mut params = CertificateParams::default();
    params.distinguished_name.push(rcgen::DnType::CommonName, "godwit migration authority");
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    Issuer::new(params, KeyPair::from_pem(&pem).unwrap())
}

#[test]
fn a_certificate_out_of_its_time_is_refused() {
    let now = OffsetDateTime::now_utc();
    let dir = pair();
    other_keys(&dir, "east", |params| params.not_after = now - Duration::days(3));
    let (source, destination) = hosts(&dir);
    let (here, there) = meet(&source, &destination);
    let words = here.unwrap_err();
    assert!(words.starts_with("the certificate of east:2 expired 3 days ago"), "{words}");
    assert!(there.unwrap_err().contains("it has expired, or a clock is wrong"));

    let dir = pair();
    other_keys(&dir, "west", |params| params.not_before = now + Duration::hours(5));
    let (source, destination) = hosts(&dir);
    let (_, there) = meet(&source, &destination);
    let words = there.unwrap_err();
    let hours = ["4 hours", "5 hours"].map(|hours| words.contains(hours));
    assert!(words.contains("of west:1 is not valid for") && hours.contains(&true), "{words}");
    assert!(words.contains("yet: compare the clocks"), "{words}");
}

#[test]
fn a_revoked_certificate_is_refused() {
    let dir = pair();
    let serial = SerialNumber::from(4711_u64);
    other_keys(&dir, "west", |params| params.serial_number = Some(serial.clone()));
    let now = OffsetDateTime::now_utc();
    let list = CertificateRevocationListParams {
        this_update: now - Duration::hours(1),
        next_update: now + Duration::days(1),
        crl_number: SerialNumber::from(1_u64),
        issuing_distribution_point: None,
        revoked_certs: vec![RevokedCertParams {
            serial_number: serial,
            revocation_time: now - Duration::hours(1),
            reason_code: Some(RevocationReason::KeyCompromise),
            invalidity_date: None,
        }],
        key_identifier_method: KeyIdMethod::Sha256,
    };
    let list = list.signed_by(&issuer(&dir)).unwrap().pem().unwrap();
    let (source, destination) = hosts(&dir);
    assert_eq!(meet(&source, &destination), (Ok(()), Ok(())), "nobody knows of it yet");
    fs::write(dir.0.join("east/ca-crl.pem"), list).unwrap();
    let (source, destination) = hosts(&dir);
    let (here, there) = meet(&source, &destination);
    assert_eq!(there.unwrap_err(), "the certificate of west:1 has been revoked");
    let words = here.unwrap_err();
    assert!(words.ends_with("it has been revoked"), "{words}");
}

#[test]
fn a_peer_that_speaks_something_else_is_told_apart() {
    let dir = pair();
    let (source, destination) = hosts(&dir);
    for (host, greeting) in [(&source, &b"GODWIT\0\x1a"[..]), (&destination, b"GODWIT\0\x1a")] {
        let (one, mut other) = sockets();
        other.write_all(greeting).unwrap();
        let error = host.session("east:2").unwrap().begin(&one).unwrap_err();
        assert!(error.to_string().starts_with("east:2 does not encrypt: give godwit"), "{error}");
    }
    let (one, other) = sockets();
    drop(other);
    assert!(source.session("east:2").unwrap().begin(&one).is_err());
}

#[test]
fn keys_are_found_as_qemu_and_libvirt_have_them() {
    let made = pair();
    let west = made.0.join("west");
    let copy = |to: &Path, file: &str| {
        fs::create_dir_all(to.parent().unwrap()).unwrap();
        fs::copy(west.join(file), to).unwrap();
    };
    let qemu = Dir::new();
    let none = Files::in_dir(&qemu.0, Side::Source).unwrap_err().to_string();
    assert!(none.contains("client-cert.pem") && none.contains("godwit keys"), "{none}");
    for (name, from) in [
        ("ca-cert.pem", "ca-cert.pem"),
        ("client-cert.pem", "host-cert.pem"),
        ("client-key.pem", "host-key.pem"),
    ] {
        copy(&qemu.0.join(name), from);
    }
    Keys::read(&Files::in_dir(&qemu.0, Side::Source).unwrap()).unwrap();
    assert!(matches!(Files::in_dir(&qemu.0, Side::Destination), Err(TlsError::NoKeys { .. })));
    let libvirt = Dir::new();
    for (name, from) in [
        ("CA/cacert.pem", "ca-cert.pem"),
        ("libvirt/servercert.pem", "host-cert.pem"),
        ("libvirt/private/serverkey.pem", "host-key.pem"),
    ] {
        copy(&libvirt.0.join(name), from);
    }
    Keys::read(&Files::in_dir(&libvirt.0, Side::Destination).unwrap()).unwrap();
}

#[test]
fn keys_that_are_wrong_are_told_by_their_file() {
    let dir = pair();
    let files = Files::in_dir(&dir.0.join("west"), Side::Source).unwrap();
    fs::set_permissions(&files.key, fs::Permissions::from_mode(0o644)).unwrap();
    let error = Keys::read(&files).unwrap_err().to_string();
    assert!(error.contains("host-key.pem can be read by others"), "{error}");
    fs::set_permissions(&files.key, fs::Permissions::from_mode(0o600)).unwrap();
    // Another host's.
    let other = Files { key: dir.0.join("east/host-key.pem"), ..files.clone() };
    let error = Host::source(&Keys::read(&other).unwrap(), "east").unwrap_err().to_string();
    assert!(error.contains("host-cert.pem: "), "{error}");
    let swapped = Files { certificate: files.key.clone(), ..files.clone() };
    let error = Keys::read(&swapped).unwrap_err().to_string();
    assert!(error.ends_with("host-key.pem holds no certificate in PEM form"), "{error}");
    let gone = Files { key: "/nowhere".into(), ..files };
    assert!(Keys::read(&gone).unwrap_err().to_string().starts_with("/nowhere: "));
}

#[test]
fn nothing_that_is_there_is_overwritten() {
    let dir = pair();
    let before = fs::read(dir.0.join("west/host-key.pem")).unwrap();
    let again = make(&dir.0, &names(&["north", "west"]), 30).unwrap_err().to_string();
    assert!(again.ends_with("west is there already: nothing was changed"), "{again}");
    assert!(!dir.0.join("north").exists());
    assert_eq!(fs::read(dir.0.join("west/host-key.pem")).unwrap(), before);
    // One more host of the same authority.
    let made = make(&dir.0, &names(&["north"]), 30).unwrap();
    assert_eq!(made.authority, None);
    let (_, destination) = hosts(&dir);
    let north = Host::source(&dir.keys("north", Side::Source), "east").unwrap();
    assert_eq!(meet(&north, &destination), (Ok(()), Ok(())));
    let key = fs::metadata(dir.0.join("north/host-key.pem")).unwrap().permissions().mode();
    assert_eq!(key & 0o777, 0o600);
    for name in ["../up", ".", "", "two words"] {
        assert!(matches!(make(&dir.0, &names(&[name]), 30), Err(TlsError::Name(_))), "{name}");
    }
}

/// So that a compiler sees what may be shared between threads.
#[test]
fn sessions_are_shared_between_threads() {
    fn shared<T: Send + Sync>() {}
    shared::<Session>();
    shared::<Host>();
}
