//! The command line of a QEMU that takes another's place on the same host, with the same memory
//! where that can be.
//!
//! Invariant: the new QEMU makes no file and opens no socket under a name that the old one has, and
//! writes nothing to memory that is the old one's before it has the guest.

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
    if !memory.is_copied() {
        words.retain(|word| !matches!(word.as_str(), "-mem-prealloc" | "--mem-prealloc"));
    }
    change_objects(&mut words, |value| match memory.is_copied() {
        true => value.to_owned(),
        false => without_prealloc(&adopted(value, memory)),
    });
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
    let stays = !memory.is_copied();
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
            "object" if stays && value.contains("discard-data") => {
                return Err(told(
                    "leave discard-data out: a QEMU that has it takes the guest's \
                                 memory along when it ends",
                ));
            }
            "object" if stays && without_prealloc(value) != value => return Err(told(PREALLOC)),
            "mem-prealloc" if stays => return Err(told(PREALLOC)),
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
    change_objects(&mut words, |value| adopted(value, memory));
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

/// Gives each object of a command line the value that `change` makes of its own.
fn change_objects(words: &mut [String], change: impl Fn(&str) -> String) {
    for at in 1..words.len() {
        if matches!(words[at - 1].as_str(), "-object" | "--object") {
            words[at] = change(&words[at]);
        }
    }
}

/// A memory back end that has the memory of the old QEMU's, where that is in a file without a name.
fn adopted(value: &str, memory: &InPlace) -> String {
    let path = find(value, "id", "").and_then(|id| memory.descriptor(&id));
    path.map_or_else(|| value.to_owned(), |path| in_file(value, path))
}

/// The memory back end `value` as one that maps `path`, shared. What is said of a memfd, the file
/// is already.
fn in_file(value: &str, path: &Path) -> String {
    const OF_MEMFDS: [&str; 5] = ["seal", "hugetlb", "hugetlbsize", "mem-path", "share"];
    const KIND: &str = "memory-backend-file";
    if value.starts_with('{') {
        let Ok(Value::Object(mut json)) = serde_json::from_str(value) else {
            return value.to_owned();
        };
        OF_MEMFDS.iter().for_each(|key| drop(json.remove(*key)));
        json.insert("qom-type".to_owned(), KIND.into());
        json.insert("share".to_owned(), true.into());
        json.insert("mem-path".to_owned(), path.to_string_lossy().into());
        return Value::Object(json).to_string();
    }
    // The kind may stand alone.
    let kept = parts_of(value, |key| {
        !OF_MEMFDS.contains(&key) && key != "qom-type" && !key.starts_with("memory-backend-")
    });
    let path = path.display().to_string().replace(',', ",,");
    let first = std::iter::once(KIND.to_owned());
    let last = ["share=on".to_owned(), format!("mem-path={path}")];
    first.chain(kept).chain(last).collect::<Vec<_>>().join(",")
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
    let kept = parts_of(value, |key| key != "prealloc");
    if kept.len() == parts(value).len() { value.to_owned() } else { kept.join(",") }
}

/// The parts of `value` whose keys are to `stay`, as they are written.
fn parts_of(value: &str, stay: impl Fn(&str) -> bool) -> Vec<String> {
    let key = |part: &String| stay(part.split_once('=').map_or(part, |(key, _)| key));
    parts(value).iter().filter(|part| key(part)).map(|part| part.replace(',', ",,")).collect()
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
    fn memory_without_a_name_is_had_by_the_old_qemus_descriptor() {
        let path = Path::new("/proc/7/fd/9");
        let memfd = "memory-backend-memfd,id=m,size=1G,hugetlb=on,seal=off,share=on,prealloc=on";
        let file = "memory-backend-file,id=m,size=1G,prealloc=on,share=on,mem-path=/proc/7/fd/9";
        assert_eq!(in_file(memfd, path), file);
        // Also one that was had so before.
        assert_eq!(in_file(&file.replace("/7/", "/3/"), path), file);
        assert_eq!(in_file(&memfd.replacen("memory", "qom-type=memory", 1), path), file);
        let json = in_file(r#"{"qom-type":"memory-backend-memfd","id":"m","seal":true}"#, path);
        let json: Value = serde_json::from_str(&json).unwrap();
        let told = ["qom-type", "id", "mem-path"].map(|key| json[key].as_str().unwrap_or(""));
        assert_eq!(told, ["memory-backend-file", "m", "/proc/7/fd/9"]);
        assert_eq!((&json["share"], &json["seal"]), (&Value::Bool(true), &Value::Null));
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
