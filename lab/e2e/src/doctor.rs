//! What `godwit doctor` finds.

use godwit_testbed::Godwit;
use serde_json::Value;

/// An answer of `godwit doctor --json`.
#[derive(Debug)]
pub struct Findings {
    /// Its exit code.
    pub code: Option<i32>,
    /// All that it said.
    pub answer: Value,
}

impl Findings {
    /// What `godwit doctor` finds of the VM called `vm`, with `options`.
    ///
    /// # Errors
    /// When it cannot be run, or answers no JSON.
    pub fn of(godwit: &Godwit, vm: &str, options: &[&str]) -> anyhow::Result<Self> {
        let output = godwit.run(&[&["doctor", "--vm", vm, "--json"], options].concat())?;
        let answer = serde_json::from_slice(&output.stdout)?;
        Ok(Self { code: output.status.code(), answer })
    }

    /// The first finding about `what` in the section `about`; null without one.
    #[must_use]
    pub fn find(&self, about: &str, what: &str) -> &Value {
        let mut named = self.all().iter().filter(|it| it["about"] == about && it["what"] == what);
        named.next().unwrap_or(&Value::Null)
    }

    /// Findings that are not good and have no cure, or are good and have one.
    #[must_use]
    pub fn without_cure(&self) -> Vec<&Value> {
        let has_cure = |it: &Value| it["cure"].as_str().is_some_and(|cure| !cure.is_empty());
        self.all().iter().filter(|it| has_cure(it) == (it["verdict"] == "good")).collect()
    }

    fn all(&self) -> &[Value] {
        self.answer["findings"].as_array().map_or(&[], Vec::as_slice)
    }
}
