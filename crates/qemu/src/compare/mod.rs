//! Whether two machines are one to a guest: everything that it sees, and that QEMU's stream of
//! device state relies on, looked at by QMP on both sides before the first byte is sent.
//!
//! The destination asks the source for its picture and compares it with its own; so what differs is
//! refused while both QEMUs are untouched, and not by a failed load with the guest stopped and the
//! destination used up.
//!
//! ```text
//!   picture    facts and devices of a machine
//!   object     one of QEMU's objects and its properties
//!   tree       the devices, out of `info qtree`
//!   differ     two pictures, and the differences in words
//!   storage    what the disks are made of: the same at both sides, or not
//! ```

mod differ;
mod object;
mod picture;
mod storage;
mod tree;

use std::collections::BTreeSet;

use godwit_engine::vm::{Ask, VmError};
use godwit_wire::ANSWER_LIMIT;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::QemuError;
use crate::machine::Machine;
use crate::monitor::commands::{MachineType, QueryMachines};
use crate::monitor::{Monitor, QmpError};

pub(crate) use storage::{Identity, identity, identity_in, told as told_storage};

use picture::Picture;
pub(crate) use picture::Realized;

/// What the destination asks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Question {
    /// What is your machine?
    Picture,
    /// What are the features of your CPUs called?
    Features,
    /// What disks has your guest, and what are they made of?
    Disks,
    /// What is in some blocks of a file of a disk?
    Samples(usize, usize),
    /// What is in these blocks of it now?
    Again(usize, usize, Vec<u64>),
    /// Where has it data?
    Data(usize, usize),
    /// What is in these pieces of it, which are larger than blocks?
    Pieces(usize, usize, Vec<u64>),
}

/// What the source answers to [`Question::Picture`].
#[derive(Debug, Serialize, Deserialize)]
struct Told {
    #[serde(flatten)]
    picture: Picture,
    /// What it would answer to [`Question::Disks`], which saves a round trip. A source that leaves
    /// it out is asked: one of before, one that cannot tell and has the reason, or one with more
    /// than fits into an answer. A picture has nothing of this name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    disks: Option<Value>,
}

/// Bytes of all differences together, well below what an abort may carry.
const TEXT: usize = 3500;

/// What the source's operator wants of the comparison.
#[derive(Clone, Debug, Default)]
pub(crate) struct Terms {
    /// Differences that are let pass, by key.
    pub(crate) allowed: Vec<String>,
    /// Disks that do not move are the same storage: they are not compared.
    pub(crate) disks_are_shared: bool,
}

/// Answers a question of the destination's, which is a stranger's text. The disks on the nodes
/// `moving` move along. `known` keeps what cannot change of the machine, once that was looked at.
///
/// # Errors
/// When it is not understood.
pub(crate) fn answer(
    machine: &mut Machine,
    known: &mut Option<Realized>,
    question: &[u8],
    (terms, moving): (&Terms, &[String]),
) -> Result<Vec<u8>, VmError> {
    let answer = match serde_json::from_slice(question)? {
        Question::Picture => {
            let qmp = &mut *machine.qmp;
            let realized = Realized::find(known, qmp).map_err(QemuError::from)?;
            let picture = Picture::with(realized, qmp).map_err(QemuError::from)?;
            let picture = Picture { allowed: terms.allowed.clone(), ..picture };
            let disks = storage::tell(machine, moving, terms.disks_are_shared).ok();
            let disks = disks.map(serde_json::to_value).transpose()?;
            let mut told = Told { picture, disks };
            let whole = serde_json::to_vec(&told)?;
            if whole.len() > ANSWER_LIMIT {
                told.disks = None;
                serde_json::to_vec(&told)?
            } else {
                whole
            }
        }
        Question::Features => serde_json::to_vec(
            &picture::feature_names(&mut *machine.qmp).map_err(QemuError::from)?,
        )?,
        Question::Disks => {
            let shared = terms.disks_are_shared;
            serde_json::to_vec(&storage::tell(machine, moving, shared).map_err(QemuError::from)?)?
        }
        Question::Samples(disk, file) => {
            serde_json::to_vec(&storage::sample(machine, (disk, file)))?
        }
        Question::Again(disk, file, blocks) => {
            serde_json::to_vec(&storage::sample_again(machine, (disk, file), blocks))?
        }
        Question::Data(disk, file) => serde_json::to_vec(&storage::data(machine, (disk, file)))?,
        Question::Pieces(disk, file, pieces) => {
            serde_json::to_vec(&storage::read_pieces(machine, (disk, file), pieces))?
        }
    };
    Ok(answer)
}

/// Has the source answer a question about `what`.
fn put<T: DeserializeOwned>(
    question: &Question,
    ask: &mut Ask<'_>,
    what: &'static str,
) -> Result<T, VmError> {
    let answer = ask(&serde_json::to_vec(question)?)?;
    Ok(serde_json::from_slice(&answer).map_err(|_| QemuError::Unclear(what))?)
}

/// Compares the source's machine and its disks with those of `machine`, of which `realized` is
/// known.
///
/// # Errors
/// All differences, unless the source's operator lets them pass.
pub(crate) fn compare(
    machine: &mut Machine,
    realized: &Realized,
    ask: &mut Ask<'_>,
) -> Result<(), VmError> {
    // Meanwhile the source looks at its own machine, and is asked when this one is known.
    let here = Picture::with(realized, &mut *machine.qmp).map_err(QemuError::from)?;
    let Told { picture, disks } = put(&Question::Picture, ask, "its machine")?;
    compare_machines(&mut *machine.qmp, &here, &picture, ask)?;
    let disks = match disks {
        Some(told) => serde_json::from_value(told).map_err(|_| QemuError::Unclear("its disks"))?,
        None => put(&Question::Disks, ask, "its disks")?,
    };
    storage::compare(machine, &disks, ask)
}

fn compare_machines(
    qmp: &mut dyn Monitor,
    here: &Picture,
    source: &Picture,
    ask: &mut Ask<'_>,
) -> Result<(), VmError> {
    // QEMU makes a list of all that it has, which takes it a while.
    let machines = match differ::is_same_machine(source, here) {
        true => BTreeSet::new(),
        false => machines(qmp).map_err(QemuError::from)?,
    };
    let mut found = differ::differences(source, here, &machines);
    found.retain(|difference| !is_allowed(&difference.key, &source.allowed));
    if found.is_empty() {
        return Ok(());
    }
    if found.iter().any(|difference| difference.key == "cpu.features") {
        let theirs: Vec<String> = put(&Question::Features, ask, "its processors")?;
        let own = picture::feature_names(qmp).map_err(QemuError::from)?;
        differ::name_features(&mut found, source, &theirs, &own);
    }
    Err(QemuError::Different(in_words(&found)).into())
}

/// What the machine behind `qmp` is, as [`answer`] tells it.
pub(crate) fn picture(qmp: &mut dyn Monitor) -> Result<Vec<u8>, QemuError> {
    serde_json::to_vec(&Picture::of(qmp)?).map_err(|_| QemuError::Unclear("its machine"))
}

/// The differences between two pictures as they were told, but for those that the source's operator
/// lets pass.
pub(crate) fn told_differences(source: &[u8], here: &[u8]) -> Result<String, QemuError> {
    let read = |told| serde_json::from_slice(told).map_err(|_| QemuError::Unclear("its machine"));
    let (source, here): (Picture, Picture) = (read(source)?, read(here)?);
    let mut found = differ::differences(&source, &here, &BTreeSet::new());
    found.retain(|difference| !is_allowed(&difference.key, &source.allowed));
    Ok(in_words(&found))
}

/// Whether the operator lets a difference pass, by its key, by the first part of it, or with all
/// others.
fn is_allowed(key: &str, allowed: &[String]) -> bool {
    allowed.iter().any(|name| {
        name == "all"
            || key == name
            || key.strip_prefix(name.as_str()).is_some_and(|rest| rest.starts_with(['.', '/']))
    })
}

/// All of them in one line, as far as there is room.
fn in_words(found: &[differ::Difference]) -> String {
    let mut text = String::new();
    for (place, difference) in found.iter().enumerate() {
        let next = format!("[{}] {}; ", difference.key, difference.text);
        if text.len() + next.len() > TEXT {
            text += &format!("and {} more; ", found.len() - place);
            break;
        }
        text += &next;
    }
    text.truncate(text.trim_end_matches("; ").len());
    text
}

/// The machine types that this QEMU has, by all their names.
fn machines(qmp: &mut dyn Monitor) -> Result<BTreeSet<String>, QmpError> {
    let names = |machine: MachineType| [machine.name, machine.alias];
    Ok(qmp.run(&QueryMachines)?.into_iter().flat_map(names).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn differences_are_let_pass_by_key_by_kind_or_all() {
        let allowed = |key: &str, names: &str| {
            let names: Vec<String> = names.split(',').map(str::to_owned).collect();
            is_allowed(key, &names)
        };
        assert!(allowed("cpu.features", "cpu.features") && allowed("cpu.features", "smp,cpu"));
        assert!(allowed("device.host/04.0/x", "device.host/04.0") && allowed("smp", "all"));
        assert!(
            !allowed("cpu.features", "cpu.model") && !allowed("cpux", "cpu") && !allowed("cpu", "")
        );
    }

    #[test]
    fn a_list_that_is_too_long_is_cut_between_two() {
        let one = differ::Difference { key: "cpu".to_owned(), text: "x".repeat(1000) };
        let text = in_words(&[one.clone(), one.clone(), one.clone(), one.clone(), one]);
        assert!(text.len() < TEXT + 30 && text.ends_with("x; and 2 more"), "{}", text.len());
    }

    #[test]
    fn sources_and_destinations_understand_each_other_whether_disks_are_told_with_the_machine() {
        let facts = [("machine".to_owned(), "q35".to_owned())].into();
        let picture = Picture { version: (10, 0, 2), facts, ..Picture::default() };
        // A source of before, whose disks are asked for.
        let alone = serde_json::to_vec(&picture).unwrap();
        let told: Told = serde_json::from_slice(&alone).unwrap();
        assert!(told.picture == picture && told.disks.is_none());

        let disks = serde_json::json!({ "disks": [], "shared": true });
        let whole = serde_json::to_vec(&Told { disks: Some(disks), ..told }).unwrap();
        let told: Told = serde_json::from_slice(&whole).unwrap();
        assert!(told.picture == picture && told.disks.is_some());
        // A destination of before.
        assert_eq!(serde_json::from_slice::<Picture>(&whole).unwrap(), picture);
    }

    #[test]
    fn questions_that_make_no_sense_are_refused() {
        for bytes in [&b""[..], b"{}", b"\"explode\"", b"[[[[[[", &[0xff; 9]] {
            assert!(serde_json::from_slice::<Question>(bytes).is_err());
        }
    }
}
