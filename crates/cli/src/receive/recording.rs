//! The record that `godwit receive` keeps, as `godwit migrate` does at the source.

use std::time::Instant;

use godwit_engine::address::Address;
use godwit_engine::destination::Notice;
use godwit_report::{ArrivalRecorder, Side};
use serde_json::Value;

use super::tell::as_json;
use crate::records;
use crate::vm::VmName;

/// A record of a guest that comes, in the making.
pub(super) struct Recording {
    recorder: ArrivalRecorder,
    vm: String,
    began_ms: u64,
    began: Instant,
}

/// Records a notice. It begins when a source is accepted: before that nothing has come. Whoever
/// takes up what a godwit has left that was killed is told first that the source is lost, which
/// that one had accepted and kept no record of.
pub(super) fn record(
    recording: &mut Option<Recording>,
    notice: &Notice,
    vm: Option<&VmName>,
    listen: &Address,
) {
    if let (None, Notice::Accepted { .. } | Notice::Severed { .. }) = (&recording, notice) {
        *recording = Some(Recording::begin(vm, listen));
    }
    let is_kept = matches!(
        notice,
        Notice::Accepted { .. }
            | Notice::Round { .. }
            | Notice::Severed { .. }
            | Notice::Resumed { .. }
    );
    if !is_kept {
        return;
    }
    if let (Some(recording), Some(event)) = (recording, as_json(notice)) {
        recording.recorder.see(recording.began.elapsed(), &event);
    }
}

impl Recording {
    fn begin(vm: Option<&VmName>, listen: &Address) -> Self {
        let vm = vm.map_or_else(|| "started".to_owned(), VmName::to_string);
        let (head, began) = (records::head(vm.clone(), listen.to_string()), Instant::now());
        let began_ms = head.began_ms.unwrap_or_default();
        Self { recorder: ArrivalRecorder::new(head), vm, began_ms, began }
    }

    /// What cannot be kept is said, and is no failure.
    pub(super) fn end(&self, last: &Value) {
        let lines = self.recorder.lines(last);
        records::keep(Side::Destination, &self.vm, self.began_ms, &lines);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    /// Whether there is a record behind these.
    fn is_begun(notices: &[Notice]) -> bool {
        let (mut recording, listen) = (None, Address::Tcp("127.0.0.1:7000".to_owned()));
        notices.iter().for_each(|notice| record(&mut recording, notice, None, &listen));
        recording.is_some()
    }

    #[test]
    fn who_takes_up_what_a_killed_one_left_keeps_a_record_and_who_only_asks_does_not() {
        // Regression: only an acceptance began one, which the killed godwit was told of.
        let severed = || Notice::Severed { why: "killed".to_owned(), limit: Duration::MAX };
        let asked = || Notice::Asked { peer: "east".to_owned(), refusal: None };
        assert!(is_begun(&[severed()]));
        assert!(is_begun(&[asked(), severed(), Notice::Resumed { after: Duration::ZERO }]));
        assert!(!is_begun(&[asked(), Notice::Looked { peer: "east".to_owned() }]));
    }
}
