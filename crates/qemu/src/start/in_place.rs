//! The command line of a QEMU that takes another's place on the same host, with the same memory.
//!
//! Invariant: the new QEMU makes no file and opens no socket under a name that the old one has, and
//! writes nothing to memory before it has the guest.

use std::path::{Path, PathBuf};

use serde_json::Value;

use super::carry::{Carried, carry_with, own_words};
use super::description::Description;
use super::mapping::Mapping;
use super::refused;
use crate::QemuError;
use crate::command_line::{Given, find, options, parts};
use crate::upgrade::InPlace;

/// The options of the new QEMU, out of those of the old one. Its paths are the old one's, but for
/// those of which `mappings` say otherwise, and for names that only one process can have.
///
/// # Errors
/// The first thing that cannot be carried, with the cure.
pub(super) fn carry_in_place(
    source: &Description,
    (mappings, scripts): (&[Mapping], &[PathBuf]),
    memory: &InPlace,
    monitor: &Path,
) -> Result<Carried, QemuError> {
    let all = options(&source.words);
    all.iter().try_for_each(check_tap)?;
    // Of those that name as much of a path the last one counts.
    let named = mappings.iter().cloned();
    let staged = memory.names().filter_map(|(old, new)| Mapping::of(old, new));
    let root = Mapping::of(Path::new("/"), Path::new("/"));
    let mappings: Vec<Mapping> = root.into_iter().chain(staged).chain(named).collect();
    let mut words = source.words.clone();
    words.retain(|word| !matches!(word.as_str(), "-mem-prealloc" | "--mem-prealloc"));
    for at in 1..words.len() {
        if matches!(words[at - 1].as_str(), "-object" | "--object") {
            words[at] = without_prealloc(&words[at]);
        }
    }
    let source = Description { words, ..source.clone() };
    carry_with(&source, (&mappings, scripts), true, monitor)
}

/// The options of the new QEMU, as the operator wrote them, program first.
///
/// # Errors
/// What stands against them, with the cure.
pub(super) fn by_command(
    command: &[String],
    memory: &InPlace,
    monitor: &Path,
) -> Result<Carried, QemuError> {
    let told = |words: &str| refused(format!("--exec: {words}"));
    let all = options(command);
    for Given { name, value } in &all {
        let value = value.as_deref().unwrap_or_default();
        match name.as_str() {
            "daemonize" => return Err(told("leave -daemonize out: godwit lets the new QEMU go")),
            "incoming" if value != "defer" => {
                return Err(told(
                    "the guest comes by way of godwit: write -incoming defer, or \
                                 nothing of it",
                ));
            }
            "object" if value.contains("discard-data") => {
                return Err(told(
                    "leave discard-data out: a QEMU that has it takes the guest's \
                                 memory along when it ends",
                ));
            }
            "object" if without_prealloc(value) != value => return Err(told(PREALLOC)),
            "mem-prealloc" => return Err(told(PREALLOC)),
            _ => {}
        }
        let taken = memory.names().find(|(old, _)| value.contains(&*old.to_string_lossy()));
        if let Some((old, _)) = taken {
            return Err(told(&format!(
                "the old QEMU has {} still (-{name}): give the new one another name",
                old.display()
            )));
        }
    }
    let mut words: Vec<String> = command.iter().skip(1).cloned().collect();
    let own = own_words(monitor);
    let waits = all.iter().any(|given| given.name == "incoming");
    words.extend_from_slice(if waits { &own[..4] } else { &own });
    Ok(Carried { words, left_out: Vec::new() })
}

const PREALLOC: &str = "leave prealloc out: older QEMUs write to the memory for it, and it is \
                        there already";

/// Refuses a network card of the host's that the old QEMU keeps to itself.
fn check_tap(given: &Given) -> Result<(), QemuError> {
    let value = given.value.as_deref().unwrap_or_default();
    let network = matches!(given.name.as_str(), "netdev" | "nic" | "net");
    let kind = find(value, "type", "type");
    match find(value, "ifname", "") {
        Some(name) if network && kind.as_deref() == Some("tap") => Err(refused(format!(
            "the old QEMU has the tap device {name}, which one process can have at a time: name \
             another one of the same bridge for the new QEMU, with --exec and its whole command \
             line"
        ))),
        _ => Ok(()),
    }
}

/// A memory back end that does not fill its memory when it is made: it is filled, and QEMU before
/// 7.0 writes each page anew for it (util/oslib-posix.c, `do_touch_pages`), over what the guest
/// writes.
fn without_prealloc(value: &str) -> String {
    if value.starts_with('{') {
        let Ok(Value::Object(mut json)) = serde_json::from_str(value) else {
            return value.to_owned();
        };
        return match json.remove("prealloc") {
            Some(_) => Value::Object(json).to_string(),
            None => value.to_owned(),
        };
    }
    let fills = |part: &String| part == "prealloc" || part.starts_with("prealloc=");
    let all = parts(value);
    if !all.iter().any(fills) {
        return value.to_owned();
    }
    let kept = all.iter().filter(|part| !fills(part)).map(|part| part.replace(',', ",,"));
    kept.collect::<Vec<_>>().join(",")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_that_is_there_is_not_filled_again() {
        let without = "memory-backend-file,id=m,mem-path=/a,,b,share=on,prealloc-threads=4";
        assert_eq!(without_prealloc(&format!("{without},prealloc=on")), without);
        assert_eq!(without_prealloc(without), without);
        let json = r#"{"qom-type":"memory-backend-file","id":"m","prealloc":true}"#;
        assert!(!without_prealloc(json).contains("prealloc"));
    }

    #[test]
    fn a_tap_device_is_one_processs() {
        let given = |value: &str| Given { name: "netdev".into(), value: Some(value.into()) };
        let told = check_tap(&given("tap,id=n,ifname=tap3,script=no")).unwrap_err().to_string();
        assert!(told.contains("tap3") && told.contains("--exec"), "{told}");
        check_tap(&given("tap,id=n,script=/usr/bin/bridge")).unwrap();
        check_tap(&given("user,id=n")).unwrap();
    }
}
