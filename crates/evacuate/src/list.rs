//! The list of virtual machines and destinations that an operator writes, in TOML or JSON; or of
//! destinations alone, where the virtual machines are found on the host.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use godwit_units::{ByteCount, Rate};
use serde::{Deserialize, Serialize};

use crate::EvacuateError;
use crate::command::filled;
use crate::plan::{Plan, PlannedDestination, PlannedVm, Receiver};

/// One to move.
///
/// ```
/// use godwit_evacuate::ListedVm;
///
/// let vm = ListedVm { vm: "libvirt:web01".into(), memory: "4GiB".into(), ..Default::default() };
/// assert!(vm.to.is_empty(), "it goes to whichever destination says how it receives");
/// ```
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
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
    /// Its disks, with what is in use of each: for the forecast, where they move along.
    #[serde(default)]
    pub disks: BTreeMap<String, String>,
    /// Who takes it in, by destination; else each destination that says how it receives.
    #[serde(default)]
    pub to: BTreeMap<String, Receiver>,
}

/// A host with room.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ListedDestination {
    /// Its name.
    pub name: String,
    /// Its `godwitd`, which is asked for what is not said here.
    #[serde(default)]
    pub godwitd: Option<String>,
    /// Memory that it has for guests.
    #[serde(default)]
    pub memory: String,
    /// Models of processors that it can be; none: all.
    #[serde(default)]
    pub cpus: Vec<String>,
    /// The most that it takes in at once; else 2.
    pub at_once: Option<u32>,
    /// Groups of which it has one already.
    #[serde(default)]
    pub groups: Vec<String>,
    /// The command that takes in whichever virtual machine comes, with `{name}` and `{memory}` for
    /// those of the one that does.
    #[serde(default)]
    pub receive: Option<Vec<String>>,
}

/// The list.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct List {
    /// Where there is room.
    #[serde(rename = "destination", default)]
    pub destinations: Vec<ListedDestination>,
    /// Who leaves.
    #[serde(rename = "vm", default)]
    pub vms: Vec<ListedVm>,
}

/// A size as every command of godwit's reads it, without rounding.
///
/// ```
/// use godwit_evacuate::exact;
/// use godwit_units::ByteCount;
///
/// assert_eq!(exact(ByteCount(6 << 30)), "6GiB");
/// assert_eq!(exact(ByteCount(4097 << 20)), "4097MiB");
/// assert_eq!(exact(ByteCount(513)).parse(), Ok(ByteCount(513)));
/// ```
#[must_use]
pub fn exact(size: ByteCount) -> String {
    let units = [(30, "GiB"), (20, "MiB"), (10, "KiB")];
    let unit = units.into_iter().find(|(bits, _)| size.0 > 0 && size.0.is_multiple_of(1 << bits));
    let (bits, unit) = unit.unwrap_or((0, "B"));
    format!("{}{unit}", size.0 >> bits)
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

    /// The same for `vms`, which were found on the host.
    ///
    /// # Errors
    /// When the list, which is `file`, has virtual machines of its own.
    pub fn of(mut self, file: &str, vms: Vec<ListedVm>) -> Result<Self, EvacuateError> {
        if !self.vms.is_empty() {
            let why = "with --from the host says which VMs there are: take the [[vm]] entries out";
            return Err(EvacuateError::List { file: file.to_owned(), why: why.to_owned() });
        }
        self.vms = vms;
        Ok(self)
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
            if host.receive.as_ref().is_some_and(Vec::is_empty) {
                return Err(wrong(format!(
                    "destination '{}', receive: there is no command in it",
                    host.name
                )));
            }
            if host.memory.is_empty() {
                return Err(wrong(format!(
                    "destination '{}' does not say what memory it has for guests: write memory = \
                     \"64GiB\", or godwitd = \"godwitd://HOST\" to have it asked",
                    host.name
                )));
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
                     or '-' in front; write name = \"…\""
                )));
            }
            if !names.insert(name.clone()) || !addresses.insert(vm.vm.clone()) {
                return Err(wrong(format!("vm '{name}' ({}) is there twice", vm.vm)));
            }
            if let Some(unknown) = vm.to.keys().find(|host| !hosts.contains(host)) {
                return Err(wrong(format!("vm '{name}' goes to '{unknown}', no destination here")));
            }
            let memory = size(&format!("vm '{name}', memory"), &vm.memory)?;
            let receivers = self.receivers(vm, &name, ByteCount(memory)).map_err(wrong)?;
            let disk = |(disk, text): (&String, &String)| {
                Ok((disk.clone(), size(&format!("vm '{name}', disk '{disk}'"), text)?))
            };
            let disks = vm.disks.iter().map(disk).collect::<Result<_, EvacuateError>>()?;
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
                disks,
                receivers,
                name,
            });
        }
        Ok(Plan {
            bytes_per_second: budget.bytes_per_second(),
            at_once,
            cpu_percent: None,
            options: Vec::new(),
            vms,
            destinations,
            forecast_seconds: 0.0,
            began_ms: 0,
            home: None,
        })
    }

    /// Who takes `vm` in, which is called `name`: as it says itself, or as destinations do.
    fn receivers(
        &self,
        vm: &ListedVm,
        name: &str,
        memory: ByteCount,
    ) -> Result<BTreeMap<String, Receiver>, String> {
        if !vm.to.is_empty() {
            return Ok(vm.to.clone());
        }
        let mut receivers = BTreeMap::new();
        for host in &self.destinations {
            let Some(command) = &host.receive else { continue };
            let words = command.iter().map(|word| filled(word, name, &exact(memory)));
            let start = words.collect::<Result<Vec<_>, _>>();
            let start =
                start.map_err(|why| format!("destination '{}', receive: {why}", host.name))?;
            receivers.insert(host.name.clone(), Receiver::Starts { start });
        }
        if receivers.is_empty() {
            return Err(format!(
                "vm '{name}' goes nowhere: it has no `to`, and no destination says how it takes \
                 guests in; write receive = [\"ssh\", \"HOST\", \"godwit\", \"receive\", …] to one"
            ));
        }
        Ok(receivers)
    }
}

/// Whether `name` makes part of a file name, of the name of a migration, and of a command without
/// meaning more than a name.
///
/// ```
/// assert!(godwit_evacuate::fits("web01.east"));
/// assert!(!godwit_evacuate::fits("web01; reboot") && !godwit_evacuate::fits("--help"));
/// ```
#[must_use]
pub fn fits(name: &str) -> bool {
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    (1..=48).contains(&name.len()) && name.chars().all(plain) && !name.starts_with(['.', '-'])
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
    fn a_vm_goes_to_every_destination_that_says_how_it_receives() {
        let text = r#"
            [[destination]]
            name = "east"
            memory = "64GiB"
            receive = ["ssh", "east", "godwit receive --vm libvirt: --name {name}-{memory}"]
            [[destination]]
            name = "west"
            memory = "64GiB"
        "#;
        let found = |name: &str| ListedVm {
            name: Some(name.to_owned()),
            vm: format!("libvirt:{name}"),
            memory: "1536MiB".to_owned(),
            ..ListedVm::default()
        };
        let list = List::parse(text, false).unwrap();
        let budget = Rate::from_bytes_per_second(1e8);
        let plan = |list: &List| list.clone().of("f", vec![found("web01")])?.plan("f", budget, 2);
        let planned = plan(&list).unwrap();
        let receivers = &planned.vms[0].receivers;
        let words = ["ssh", "east", "godwit receive --vm libvirt: --name web01-1536MiB"];
        let start = words.map(str::to_owned).to_vec();
        assert_eq!(receivers.len(), 1);
        assert_eq!(receivers["east"], Receiver::Starts { start });

        let told = |list: &List| plan(list).unwrap_err().to_string();
        let mut wrong = list.clone();
        wrong.destinations[0].receive = Some(vec!["x".into(), "{nmae}".into()]);
        let words = "f: destination 'east', receive: nobody knows {nmae}: there are {name} and";
        assert!(told(&wrong).starts_with(words), "{}", told(&wrong));
        wrong.destinations[0].receive = None;
        assert!(told(&wrong).contains("vm 'web01' goes nowhere"), "{}", told(&wrong));
        wrong.destinations[0].receive = Some(Vec::new());
        assert!(told(&wrong).contains("there is no command in it"), "{}", told(&wrong));
        wrong.vms.push(found("db"));
        assert!(told(&wrong).contains("take the [[vm]] entries out"), "{}", told(&wrong));
    }

    #[test]
    fn what_is_wrong_with_a_list_is_said_with_its_place() {
        for (from, to, words) in [
            ("name = \"east\"", "nam = \"east\"", "line 3: unknown field `nam`"),
            ("{ east =", "{ west =", "goes to 'west', no destination here"),
            ("\"4GiB\"", "\"4\"", "vm 'qemu--run-web01.qmp', memory:"),
            ("name = \"db\"", "name = \"d/b\"", "vm 'd/b': a name has"),
            ("name = \"db\"", "name = \"--db\"", "vm '--db': a name has"),
            ("libvirt:db", "qemu:/run/web01.qmp", "is there twice"),
        ] {
            let text = refused(&TEXT.replacen(from, to, 1));
            assert!(text.contains(words), "{text}");
        }
    }
}
