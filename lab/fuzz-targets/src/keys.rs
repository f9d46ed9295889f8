//! Keys: PEM files, and peers that are to encrypt.
//!
//! A file that is all made up ends where its first line does, so there are real ones, made once by
//! each process, and the input says what becomes of them.

use std::io::{self, Read, Write};
use std::path::PathBuf;
use std::sync::OnceLock;

use godwit_tls::{Files, Host, Keys, Side, looks_encrypted, make};
use rustix::fs::{MemfdFlags, Mode, fchmod, memfd_create};

/// The authority's certificate, a host's, and that host's key.
type Pem = [Vec<u8>; 3];

const NAME: &str = "west";

/// The first byte says what is listened to.
pub(crate) fn keys(bytes: &[u8]) {
    let Some((first, rest)) = bytes.split_first() else { return };
    let Some(pem) = pem() else { return };
    match first & 3 {
        0 => files(&changed(pem, rest), None),
        1 => files(pem, Some(rest)),
        2 => peer(pem, Side::Destination, rest),
        _ => peer(pem, Side::Source, rest),
    }
}

fn pem() -> Option<&'static Pem> {
    static PEM: OnceLock<Option<Pem>> = OnceLock::new();
    let made = || {
        let name = format!("godwit-fuzz-keys-{}", std::process::id());
        let dir = std::env::temp_dir().join(name);
        let made = make(&dir, &[NAME.to_owned()], 365).ok()?;
        let read = |file: &str| std::fs::read(made.hosts[0].join(file)).ok();
        let pem = ["ca-cert.pem", "host-cert.pem", "host-key.pem"].map(read);
        std::fs::remove_dir_all(&dir).ok()?;
        let [Some(authority), Some(certificate), Some(key)] = pem else { return None };
        Some([authority, certificate, key])
    };
    PEM.get_or_init(made).as_ref()
}

/// The files with other bytes in them: which file, where, and what is there instead of how much.
fn changed(pem: &Pem, mut input: &[u8]) -> Pem {
    let mut changed = pem.clone();
    while let Some(([which, low, high, cut, length], rest)) = input.split_first_chunk() {
        let file = &mut changed[usize::from(*which) % 3];
        let at = usize::from(u16::from_le_bytes([*low, *high])).min(file.len());
        let end = (at + usize::from(*cut)).min(file.len());
        let (new, rest) = rest.split_at(usize::from(*length).min(rest.len()));
        file.splice(at..end, new.iter().copied());
        input = rest;
    }
    changed
}

/// A file that only this process sees.
fn file(bytes: &[u8]) -> Option<(std::fs::File, PathBuf)> {
    let descriptor = memfd_create("pem", MemfdFlags::CLOEXEC).ok()?;
    fchmod(&descriptor, Mode::RUSR | Mode::WUSR).ok()?;
    let mut file = std::fs::File::from(descriptor);
    file.write_all(bytes).ok()?;
    let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&file));
    Some((file, path.into()))
}

fn read(pem: &Pem, revoked: Option<&[u8]>) -> Option<Keys> {
    let [authority, certificate, key] = pem.each_ref().map(|bytes| file(bytes));
    let (authority, certificate, key) = (authority?, certificate?, key?);
    let revoked = revoked.and_then(file);
    let files = Files {
        authority: authority.1,
        certificate: certificate.1,
        key: key.1,
        revoked: revoked.as_ref().map(|(_, path)| path.clone()),
    };
    Keys::read(&files).inspect_err(|error| drop(error.to_string())).ok()
}

fn files(pem: &Pem, revoked: Option<&[u8]>) {
    let Some(keys) = read(pem, revoked) else { return };
    for host in [Host::source(&keys, NAME), Host::destination(&keys, &[])] {
        match host {
            Ok(host) => drop(host.session("east")),
            Err(error) => drop(error.to_string()),
        }
    }
}

/// A socket at whose other end somebody has said all there is to hear, a few bytes at a time.
struct Heard<'a>(&'a [u8]);

impl Read for Heard<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let most = buffer.len().min(701);
        (&mut self.0).take(most as u64).read(buffer)
    }
}

impl Write for Heard<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn peer(pem: &Pem, side: Side, said: &[u8]) {
    let _ = looks_encrypted(said);
    let Some(keys) = read(pem, None) else { return };
    let host = match side {
        Side::Source => Host::source(&keys, NAME),
        Side::Destination => Host::destination(&keys, &[]),
    };
    let Ok(session) = host.and_then(|host| host.session("east")) else { return };
    let mut socket = Heard(said);
    match session.begin(&mut socket) {
        Ok(()) => {
            let mut buffer = [0; 4096];
            while session.read(&mut socket, &mut buffer).is_ok_and(|read| read > 0) {}
        }
        Err(error) => drop(error.to_string()),
    }
}
