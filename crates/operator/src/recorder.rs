//! Edge: what happens to a job, as events that `kubectl get events` shows.

use k8s_openapi::api::core::v1::ObjectReference;
use kube::Client;
use kube::runtime::events::{Event, EventType, Recorder, Reporter};
use tokio::sync::mpsc;
use tracing::warn;

use crate::names;

/// The longest note that the API server takes, in bytes.
const NOTE_MAX: usize = 1000;

/// Something worth telling.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Story {
    /// A word, in PascalCase.
    pub reason: String,
    /// A sentence.
    pub note: String,
    /// Whether somebody should look.
    pub warning: bool,
}

/// Tells stories of an object, one after the other, until nobody brings any more.
pub async fn tell(client: Client, about: ObjectReference, mut stories: mpsc::UnboundedReceiver<Story>) {
    let recorder = recorder(client, about.name.clone());
    while let Some(story) = stories.recv().await {
        tell_one(&recorder, &about, story).await;
    }
}

/// Tells stories in the name of `instance`.
pub fn recorder(client: Client, instance: Option<String>) -> Recorder {
    Recorder::new(client, Reporter { controller: names::MANAGER.into(), instance })
}

/// Tells one story of an object.
pub async fn tell_one(recorder: &Recorder, about: &ObjectReference, story: Story) {
    let event = Event {
        type_: if story.warning { EventType::Warning } else { EventType::Normal },
        reason: story.reason,
        note: Some(shortened(story.note)),
        action: "Training".into(),
        secondary: None,
    };
    // Events are for people; a job does not depend on them.
    if let Err(error) = recorder.publish(&event, about).await {
        warn!(%error, "an event was not told");
    }
}

fn shortened(mut note: String) -> String {
    let mut end = note.len().min(NOTE_MAX);
    while !note.is_char_boundary(end) {
        end -= 1;
    }
    note.truncate(end);
    note
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn notes_are_cut_between_characters() {
        let long = "ä".repeat(NOTE_MAX);
        assert_eq!(shortened(long).len(), NOTE_MAX);
        assert_eq!(shortened("x".to_string() + &"ä".repeat(NOTE_MAX)).len(), NOTE_MAX - 1);
        assert_eq!(shortened("short".into()), "short");
    }
}
