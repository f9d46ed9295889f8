//! The list of virtual machines and destinations that an operator writes, in TOML or JSON.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use godwit_units::{ByteCount, Rate};
use serde::Deserialize;

use crate::EvacuateError;
use crate::plan::{Plan, PlannedDestination, PlannedVm, Receiver};

/// One to move.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ListedVm {
    /// Its name; else the `vm`.
    pub name: Option<String>,
    /// As `godwit migrate --vm` knows it.
    pub vm: String,
    /// Its memory.
    pub memory: String,
    /// How much of that holds data; else all.
    pub data: Option<String>,
    /// How fast it writes.
    pub dirty: Option<String>,
    /// The model of processor that it needs.
    pub cpu: Option<String>,
    /// At most one of a group is on a host.
    pub group: Option<String>,
    /// Who takes it in, by destination.
    pub to: BTreeMap<String, Receiver>,
}

/// A host with room.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ListedDestination {
    /// Its name.
    pub name: String,
    /// Memory that it has for guests.
    pub memory: String,
    /// Models of processors that it can be; none: all.
    #[serde(default)]
    pub cpus: Vec<String>,
    /// The most that it takes in at once; else 2.
    pub at_once: Option<u32>,
    /// Groups of which it has one already.
    #[serde(default)]
    pub groups: Vec<String>,
}

/// The list.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct List {
    /// Where there is room.
    #[serde(rename = "destination")]
    pub destinations: Vec<ListedDestination>,
    /// Who leaves.
    #[serde(rename = "vm")]
    pub vms: Vec<ListedVm>,
}

impl List {
    /// Reads the one in `file`: JSON if its name ends so, else TOML.
    ///
    /// # Errors
    /// What is wrong, and where.
    pub fn read(file: &Path) -> Result<Self, EvacuateError> {
        let wrong = |why: String| EvacuateError::List { file: file.display().to_string(), why };
        let text = std::fs::read_to_string(file)
            .map_err(|error| wrong(format!("cannot be read: {error}")))?;
        let is_json = file.extension().is_some_and(|extension| extension == "json");
        Self::parse(&text, is_json).map_err(wrong)
    }

    fn parse(text: &str, is_json: bool) -> Result<Self, String> {
        if is_json {
            return serde_json::from_str(text).map_err(|error| error.to_string());
        }
        toml::from_str(text).map_err(|error: toml::de::Error| {
            let line = error.span().map(|span| 1 + text[..span.start].matches('\n').count());
            let line = line.map_or_else(String::new, |line| format!("line {line}: "));
            format!("{line}{}", error.message())
        })
    }

    /// The plan for it, under these limits.
    ///
    /// # Errors
    /// What is wrong with an entry.
    pub fn plan(&self, file: &str, budget: Rate, at_once: u32) -> Result<Plan, EvacuateError> {
        let wrong = |why: String| EvacuateError::List { file: file.to_owned(), why };
        let size = |of: &str, text: &str| {
            let parsed = text.parse::<ByteCount>();
            parsed.map(|size| size.0).map_err(|error| wrong(format!("{of}: {error}")))
        };
        let mut hosts = BTreeSet::new();
        let mut destinations = Vec::new();
        for host in &self.destinations {
            if !hosts.insert(&host.name) {
                return Err(wrong(format!("destination '{}' is there twice", host.name)));
            }
            destinations.push(PlannedDestination {
                name: host.name.clone(),
                room_bytes: size(&format!("destination '{}', memory", host.name), &host.memory)?,
                cpus: host.cpus.clone(),
                at_once: host.at_once.unwrap_or(2).max(1),
                groups: host.groups.clone(),
            });
        }
        let (mut names, mut addresses) = (BTreeSet::new(), BTreeSet::new());
        let mut vms = Vec::new();
        for vm in &self.vms {
            let name = vm.name.clone().unwrap_or_else(|| file_name(&vm.vm));
            if !fits(&name) {
                return Err(wrong(format!(
                    "vm '{name}': a name has 1 to 48 letters, digits, '-', '_' and '.', and no '.' \
                     in front; write name = \"…\""
                )));
            }
            if !names.insert(name.clone()) || !addresses.insert(vm.vm.clone()) {
                return Err(wrong(format!("vm '{name}' ({}) is there twice", vm.vm)));
            }
            if let Some(unknown) = vm.to.keys().find(|host| !hosts.contains(host)) {
                return Err(wrong(format!("vm '{name}' goes to '{unknown}', no destination here")));
            }
            let memory = size(&format!("vm '{name}', memory"), &vm.memory)?;
            let data = vm.data.as_deref();
            let data = data.map(|text| size(&format!("vm '{name}', data"), text)).transpose()?;
            let dirty = vm.dirty.as_deref().map(str::parse::<Rate>).transpose();
            let dirty = dirty.map_err(|error| wrong(format!("vm '{name}', dirty: {error}")))?;
            vms.push(PlannedVm {
                vm: vm.vm.clone(),
                memory_bytes: memory,
                data_bytes: data.unwrap_or(memory).min(memory),
                dirty_bytes_per_second: dirty.unwrap_or_default().bytes_per_second(),
                cpu: vm.cpu.clone(),
                group: vm.group.clone(),
                receivers: vm.to.clone(),
                name,
            });
        }
        Ok(Plan {
            bytes_per_second: budget.bytes_per_second(),
            at_once,
            options: Vec::new(),
            vms,
            destinations,
            forecast_seconds: 0.0,
            began_ms: 0,
        })
    }
}

/// Whether `name` makes part of a file name, and of the name of a migration.
fn fits(name: &str) -> bool {
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    (1..=48).contains(&name.len()) && name.chars().all(plain) && !name.starts_with('.')
}

/// A name made of the address of a VM.
fn file_name(vm: &str) -> String {
    let plain = |c: char| if c.is_ascii_alphanumeric() || "-_.".contains(c) { c } else { '-' };
    let name: String = vm.chars().map(plain).collect();
    let from = name.len().saturating_sub(48);
    name[from..].trim_start_matches(['-', '.']).to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = r#"
        [[destination]]
        name = "east"
        memory = "64GiB"
        [[vm]]
        vm = "qemu:/run/web01.qmp"
        memory = "4GiB"
        dirty = "20MiB/s"
        to = { east = "192.0.2.7:7000" }
        [[vm]]
        name = "db"
        vm = "libvirt:db"
        memory = "8GiB"
        group = "db"
        to.east.start = ["ssh", "east", "godwit-take", "db"]
    "#;

    fn refused(text: &str) -> String {
        let list = List::parse(text, false);
        let plan = list.map_err(|why| EvacuateError::List { file: "f".into(), why });
        let plan = plan.and_then(|list| list.plan("f", Rate::from_bytes_per_second(1e8), 2));
        plan.unwrap_err().to_string()
    }

    #[test]
    fn a_list_becomes_a_plan() {
        let plan = List::parse(TEXT, false).unwrap();
        let plan = plan.plan("f", Rate::from_bytes_per_second(1e8), 2).unwrap();
        assert_eq!(plan.vms[0].name, "qemu--run-web01.qmp");
        assert_eq!(plan.vms[0].receivers["east"], Receiver::Listens("192.0.2.7:7000".into()));
        assert!(
            matches!(&plan.vms[1].receivers["east"], Receiver::Starts { start } if start.len() == 4)
        );
        assert_eq!(plan.vms[0].data_bytes, 4 << 30);
        let (vms, hosts, source) = plan.inventory();
        assert_eq!((vms[1].group, hosts[0].room.0, source.at_once), (Some(0), 64 << 30, 2));
    }

    #[test]
    fn what_is_wrong_with_a_list_is_said_with_its_place() {
        for (from, to, words) in [
            ("name = \"east\"", "nam = \"east\"", "line 3: unknown field `nam`"),
            ("{ east =", "{ west =", "goes to 'west', no destination here"),
            ("\"4GiB\"", "\"4\"", "vm 'qemu--run-web01.qmp', memory:"),
            ("name = \"db\"", "name = \"d/b\"", "vm 'd/b': a name has"),
            ("libvirt:db", "qemu:/run/web01.qmp", "is there twice"),
        ] {
            let text = refused(&TEXT.replacen(from, to, 1));
            assert!(text.contains(words), "{text}");
        }
    }
}
