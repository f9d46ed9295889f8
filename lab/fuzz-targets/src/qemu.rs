//! What a QEMU says, and what a peer says of its own.

use std::io::Write;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::OnceLock;

use godwit_qemu::{Mapping, strangers};

/// Less than a socket holds, so that nobody need read meanwhile.
const MOST: usize = 64 << 10;

/// A monitor that says all this, whatever it is told.
pub(crate) fn monitor(bytes: &[u8]) {
    let Ok((ours, mut theirs)) = UnixStream::pair() else { return };
    let written = theirs.write_all(&bytes[..bytes.len().min(MOST)]);
    if written.and_then(|()| theirs.shutdown(Shutdown::Write)).is_err() {
        return;
    }
    match strangers::look(ours) {
        // A machine that was seen is told to a peer, and is not another for that.
        Ok(picture) => {
            assert!(strangers::differences(&picture, &picture).is_ok_and(|it| it.is_empty()))
        }
        Err(error) => drop(error.to_string()),
    }
}

/// The picture of the source's machine, and behind a NUL that of the one here.
pub(crate) fn machine(bytes: &[u8]) {
    let mut pictures = bytes.splitn(2, |byte| *byte == 0);
    let (source, here) = (pictures.next().unwrap_or_default(), pictures.next().unwrap_or_default());
    if let Ok(words) = strangers::differences(source, here) {
        assert!(words.len() <= 4096, "{} bytes do not fit into a reason", words.len());
        // What our own QEMU says is shown as it is.
        let plain =
            !here.iter().any(|byte| byte.is_ascii_control() || matches!(byte, b'\\' | 0x80..));
        assert!(!plain || !words.contains(char::is_control), "{words:?}");
    }
    let _ = strangers::storage(source, here);
}

/// What the operator has named: a file, and a directory that is not there.
const NAMED: [&str; 2] = ["/dev/null", "/nowhere/named"];

/// What a source tells of its QEMU. No path comes of it that was not named.
pub(crate) fn start(bytes: &[u8]) {
    static MAPPINGS: OnceLock<Vec<Mapping>> = OnceLock::new();
    let mappings = MAPPINGS.get_or_init(|| NAMED.iter().filter_map(|it| it.parse().ok()).collect());
    let scripts = [PathBuf::from("/nowhere/script")];
    let monitor = "/nowhere/monitor".as_ref();
    match strangers::command_line(bytes, (mappings, &scripts), monitor) {
        Ok(words) => checked(&words),
        Err(error) => drop(error.to_string()),
    }
}

/// A look of another kind than the one that the command line has been through.
fn checked(words: &[String]) {
    assert!(words.iter().any(|word| word == "-incoming"));
    for word in words {
        let parts = strangers::parts(word);
        let empty = parts.iter().any(|part| matches!(&**part, "path=" | "file=" | "filename="));
        assert!(!empty || is_text(words, word), "an empty path: {words:?}");
        for forbidden in ["/etc/", "../", "/dev/fd"] {
            // These are free text, which QEMU opens nothing by.
            assert!(!word.contains(forbidden) || is_text(words, word), "{words:?}");
        }
    }
}

/// Whether the word is the value of an option whose value is text.
fn is_text(words: &[String], word: &String) -> bool {
    let mut pairs = words.windows(2);
    const TEXT: [&str; 12] = [
        "-action", "-append", "-compat", "-cpu", "-echr", "-id", "-k", "-m", "-msg", "-name",
        "-smbios", "-fw_cfg",
    ];
    pairs.any(|pair| &pair[1] == word && TEXT.contains(&pair[0].as_str()))
}

/// The description of a domain of libvirt's, as its source tells it.
pub(crate) fn domain(bytes: &[u8]) {
    match strangers::domain(bytes, "/nowhere/image".as_ref()) {
        Ok(image) => {
            assert!(image.len().is_multiple_of(4096) && image.starts_with(b"LibvirtQemudSave"));
        }
        Err(error) => drop(error.to_string()),
    }
}

/// The state of a QEMU's devices, and behind a NUL the settings of a QEMU, as text.
pub(crate) fn state(bytes: &[u8]) {
    let (kind, rest) = bytes.split_first().map_or((&0, bytes), |(first, rest)| (first, rest));
    if kind & 1 == 0 {
        if let Some(stream) = strangers::device_state(rest, "pc-q35-10.0") {
            assert!(stream.len() > rest.len() && stream.starts_with(b"QEVM\0\0\0\x03\x07"));
        }
        return;
    }
    let text = String::from_utf8_lossy(rest);
    for (name, value) in strangers::settings(&text) {
        let _ = (name.len(), strangers::parts(&value).len());
    }
}
