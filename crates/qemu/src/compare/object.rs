//! One of QEMU's objects: what its properties are.

use std::collections::BTreeMap;

use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::monitor::commands::{Command, Properties, PropertyValue, QomGet, QomList, QomListGet};
use crate::monitor::{Monitor, QmpError, Version};

/// Since when QEMU tells all properties of an object at once.
const TELLS_ALL: Version = (10, 1, 0);

/// An object whose properties stay as they are while this is used: a QEMU that can has told them
/// all at once.
#[derive(Debug)]
pub(super) struct Object<'a> {
    path: &'a str,
    /// By name: the type, and the value, which is null where it cannot be read.
    known: Option<BTreeMap<String, (String, Value)>>,
}

impl<'a> Object<'a> {
    /// The object at `path`, whether there is one or not.
    pub(super) fn at(path: &'a str, qmp: &mut dyn Monitor) -> Result<Self, QmpError> {
        let told = match qmp.version() < TELLS_ALL {
            true => None,
            false => qmp.run_if_known(&QomListGet { paths: &[path] })?,
        };
        let known =
            told.and_then(|told| told.into_iter().next()).map(|Properties { properties }| {
                let by_name = |it: PropertyValue| (it.name, (it.kind, it.value));
                properties.into_iter().map(by_name).collect()
            });
        Ok(Self { path, known })
    }

    /// What a property is, or `None` where this QEMU does not know it.
    pub(super) fn property<T: DeserializeOwned>(
        &self,
        qmp: &mut dyn Monitor,
        name: &str,
    ) -> Result<Option<T>, QmpError> {
        let Some(known) = &self.known else {
            return qmp.run_if_known(&QomGet::new(self.path, name));
        };
        let value = known.get(name).map(|(_, value)| value).filter(|value| !value.is_null());
        let read = value.map(T::deserialize).transpose();
        read.map_err(|source| QmpError::Unclear {
            command: QomListGet::NAME,
            version: qmp.version(),
            source,
        })
    }

    /// The names of its properties of the type `kind`.
    pub(super) fn names_of(
        &self,
        qmp: &mut dyn Monitor,
        kind: &str,
    ) -> Result<Vec<String>, QmpError> {
        let Some(known) = &self.known else {
            let list = qmp.run(&QomList { path: self.path })?;
            let of_kind = list.into_iter().filter(|entry| entry.kind == kind);
            return Ok(of_kind.map(|entry| entry.name).collect());
        };
        let of_kind = known.iter().filter(|(_, (its, _))| its == kind);
        Ok(of_kind.map(|(name, _)| name.clone()).collect())
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::monitor::stand_in::{REFUSED, StandIn};

    const CPU: &str = "/machine/unattached/device[0]";

    fn look(mut machine: StandIn) -> (Option<u64>, Option<bool>, Option<String>, Vec<String>) {
        let cpu = Object::at(CPU, &mut machine).unwrap();
        let level = cpu.property(&mut machine, "level").unwrap();
        let (on, none) = (cpu.property(&mut machine, "pmu"), cpu.property(&mut machine, "crash"));
        (level, on.unwrap(), none.unwrap(), cpu.names_of(&mut machine, "bool").unwrap())
    }

    #[test]
    fn properties_are_told_at_once_where_qemu_can_and_else_one_by_one() {
        let refused = json!({ REFUSED: "no such" });
        let singly = [
            (&*format!("{CPU} level"), json!(13)),
            (&*format!("{CPU} pmu"), json!(false)),
            (&*format!("{CPU} crash"), refused.clone()),
            (
                CPU,
                json!([{ "name": "level", "type": "uint32" }, { "name": "pmu", "type": "bool" }]),
            ),
        ];
        let at_once = json!([{ "properties": [
            { "name": "level", "type": "uint32", "value": 13 },
            { "name": "pmu", "type": "bool", "value": false },
            // One that cannot be read.
            { "name": "crash", "type": "GuestPanicInformation" },
        ] }]);
        let found = (Some(13), Some(false), None, vec!["pmu".to_owned()]);

        let old = StandIn::new(&singly);
        let told = std::sync::Arc::clone(&old.told);
        assert_eq!(look(old), found);
        assert!(told.lock().unwrap().iter().all(|(command, _)| command != "qom-list-get"));

        let new = StandIn::new(&[("qom-list-get", at_once)]).of_version((10, 1, 0));
        let told = std::sync::Arc::clone(&new.told);
        assert_eq!(look(new), found);
        assert_eq!(told.lock().unwrap().len(), 1);

        // One that is built without it.
        let without = StandIn::new(&singly).in_turn("qom-list-get", vec![refused]);
        assert_eq!(look(without.of_version((11, 1, 2))), found);
    }
}
