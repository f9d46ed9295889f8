//! Events that have come and that nobody has taken yet.

use std::collections::VecDeque;

use super::{Event, Seen};

/// Events kept for later; the oldest go first when nobody asks for them.
const LIMIT: usize = 1024;

/// Events in the order in which they came.
#[derive(Debug, Default)]
pub(super) struct EventQueue {
    events: VecDeque<Event>,
    /// So many of the first were looked at by the wait that is under way, and are kept.
    looked_at: usize,
}

impl EventQueue {
    /// Keeps an event; the oldest one goes where there are too many.
    pub(super) fn push(&mut self, event: Event) {
        if self.events.len() == LIMIT {
            self.events.pop_front();
            self.looked_at = self.looked_at.saturating_sub(1);
        }
        self.events.push_back(event);
    }

    pub(super) fn is_empty(&self) -> bool {
        self.events.is_empty()
    }

    /// Takes all.
    pub(super) fn take(&mut self) -> Vec<Event> {
        self.looked_at = 0;
        self.events.drain(..).collect()
    }

    /// A wait begins, which looks at all.
    pub(super) fn begin_wait(&mut self) {
        self.looked_at = 0;
    }

    /// Looks at those that this wait has not looked at yet, up to the one that is awaited.
    pub(super) fn find(&mut self, look: &mut dyn FnMut(&Event) -> Seen) -> Option<Event> {
        while let Some(event) = self.events.get(self.looked_at) {
            match look(event) {
                Seen::Kept => self.looked_at += 1,
                Seen::TakenIn => drop(self.events.remove(self.looked_at)),
                Seen::Awaited => return self.events.remove(self.looked_at),
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use serde_json::Value;

    use super::*;

    fn event(number: usize) -> Event {
        Event::emitted(number.to_string(), Value::Null, Duration::ZERO)
    }

    #[test]
    fn what_is_kept_is_there_for_the_next_wait() {
        let mut queue = EventQueue::default();
        (0..4).for_each(|number| queue.push(event(number)));
        queue.begin_wait();
        let found = queue.find(&mut |event| match event.name.as_str() {
            "1" => Seen::TakenIn,
            "2" => Seen::Awaited,
            _ => Seen::Kept,
        });
        assert_eq!(found.unwrap().name, "2");
        queue.begin_wait();
        assert_eq!(queue.find(&mut |_| Seen::Awaited).unwrap().name, "0");
        assert_eq!(queue.take().len(), 1);
        assert!(queue.is_empty());
    }

    #[test]
    fn a_wait_looks_at_each_event_once_also_when_old_ones_go() {
        let mut queue = EventQueue::default();
        queue.begin_wait();
        let mut seen = Vec::new();
        for number in 0..LIMIT + 3 {
            queue.push(event(number));
            queue.find(&mut |event| {
                seen.push(event.name.clone());
                Seen::Kept
            });
        }
        let all: Vec<String> = (0..LIMIT + 3).map(|number| number.to_string()).collect();
        assert_eq!(seen, all);
        assert_eq!(queue.take()[0].name, "3");
    }
}
