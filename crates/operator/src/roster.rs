//! The pods of a job's workers and servers, as the watch tells of them, and what of that is news. Pure.

use std::collections::{BTreeMap, BTreeSet};

use elasticdl_wire::control::Role;
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;

use crate::names;
use crate::pod::{self, Cause, End, State, Wait};

/// Which process of a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Who {
    /// Worker or server.
    pub role: Role,
    /// Its number.
    pub id: u32,
    /// Tells two of one number apart.
    pub launch: u32,
}

/// Something that the master should know.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum News {
    /// A pod has ended, or is as good as that.
    Ended(Who, End),
    /// A pod does not run yet, for this reason.
    Waits(Who, Wait),
    /// A pod that had no room has some now.
    Placed(Who),
}

impl News {
    /// A pod could not be made.
    pub fn refused(who: Who, why: String) -> News {
        News::Ended(who, End { last_lines: vec![why], ..End::by(Cause::Own) })
    }
}

/// A pod that is known.
#[derive(Debug, Clone)]
struct Known {
    who: Who,
    state: State,
    high: bool,
    /// The master has been told of its end.
    told: bool,
    /// It came later and not from us: an earlier master, cut off and back for a moment, had it made.
    stray: bool,
}

/// The pods of a job.
#[derive(Debug, Default)]
pub struct Roster {
    pods: BTreeMap<String, Known>,
    /// Names seen since the watch began anew.
    relisted: Option<Vec<String>>,
    /// Whether it is known which pods there were when this master began.
    looked: bool,
    /// Launches of ours.
    started: BTreeSet<u32>,
    /// Deaths for lack of memory: of the workers together, and of each server.
    memory_deaths: BTreeMap<(i32, u32), u32>,
}

impl Roster {
    /// We are about to make a pod.
    pub fn starts(&mut self, who: Who) {
        self.started.insert(who.launch);
    }

    /// A pod has been made, or has changed.
    pub fn applied(&mut self, pod: &Pod) -> Option<News> {
        let who = who(pod)?;
        let name = pod.name_any();
        self.remember_memory(pod, who);
        if let Some(relisted) = &mut self.relisted {
            relisted.push(name.clone());
        }
        let state = pod::state(pod);
        let high =
            pod.spec.as_ref().and_then(|s| s.priority_class_name.as_deref()) == Some(names::PRIORITY_HIGH);
        let before = self.pods.get(&name).filter(|known| known.who == who);
        let told = before.is_some_and(|known| known.told);
        let same = before.is_some_and(|known| known.state == state);
        let had_no_room =
            before.is_some_and(|known| matches!(&known.state, State::Waits(Some(wait)) if wait.may_pass));
        let stray = match before {
            Some(known) => known.stray,
            None => self.looked && !self.started.contains(&who.launch),
        };
        self.pods.insert(name.clone(), Known { who, state: state.clone(), high, told, stray });
        match state {
            State::Ended(end) => self.tell(&name, end),
            State::Waits(Some(wait)) if !same => Some(News::Waits(who, wait)),
            State::Waits(None) | State::Runs if had_no_room => Some(News::Placed(who)),
            _ => None,
        }
    }

    /// We made a pod, which looked like this then. The watch may have told more of it by now, and knows better.
    pub fn created(&mut self, pod: &Pod) -> Option<News> {
        if self.knows(who(pod)?) { None } else { self.applied(pod) }
    }

    /// A pod is gone.
    pub fn deleted(&mut self, pod: &Pod) -> Option<News> {
        let name = pod.name_any();
        let who = who(pod)?;
        self.pods.get(&name).filter(|known| known.who == who)?;
        let news = self.tell(&name, pod::end(pod));
        self.pods.remove(&name);
        news
    }

    /// The watch begins anew: all pods there are will be told.
    pub fn relist_begins(&mut self) {
        self.relisted = Some(Vec::new());
    }

    /// Those were all: any other is gone.
    pub fn relist_ends(&mut self) -> Vec<News> {
        let Some(there) = self.relisted.take() else { return Vec::new() };
        self.looked = true;
        let gone: Vec<String> = self.pods.keys().filter(|name| !there.contains(name)).cloned().collect();
        let mut news = Vec::new();
        for name in gone {
            news.extend(self.tell(&name, End::by(Cause::Deleted)));
            self.pods.remove(&name);
        }
        news
    }

    /// Pods that should be gone by now (Unix seconds) and are not: their node is away. The master need not
    /// wait for them; whoever still runs there is fenced.
    pub fn overdue(&mut self, now: i64) -> Vec<News> {
        let late = |known: &Known| matches!(known.state, State::Leaves(gone) if gone < now) && !known.told;
        let names: Vec<String> =
            self.pods.iter().filter(|(_, k)| late(k)).map(|(name, _)| name.clone()).collect();
        names.iter().filter_map(|name| self.tell(name, End::by(Cause::NodeLost))).collect()
    }

    /// Whether the very pod is there and has not ended.
    pub fn is_alive(&self, who: Who) -> bool {
        self.pods
            .values()
            .any(|known| known.who == who && !known.told && !matches!(known.state, State::Ended(_)))
    }

    /// Whether the very pod is known, whether it has ended or not.
    pub fn knows(&self, who: Who) -> bool {
        self.pods.values().any(|known| known.who == who)
    }

    /// The names of this process's pod.
    pub fn name_of(&self, who: Who) -> Option<&str> {
        self.pods.iter().find(|(_, known)| known.who == who).map(|(name, _)| name.as_str())
    }

    /// Whether a pod of this name is there.
    pub fn has(&self, name: &str) -> bool {
        self.pods.contains_key(name)
    }

    /// Workers that are there, and how many of them are high.
    pub fn workers(&self) -> (u32, u32) {
        let workers = self.pods.values().filter(|known| known.who.role == Role::Worker && !known.told);
        workers.fold((0, 0), |(all, high), known| (all + 1, high + u32::from(known.high)))
    }

    /// How often pods like this one were killed for their memory.
    pub fn memory_deaths(&self, role: Role, id: u32) -> u32 {
        self.memory_deaths.get(&memory_key(role, id)).copied().unwrap_or(0)
    }

    /// Whether the pod of this name has ended and is still there.
    pub fn has_ended(&self, name: &str) -> bool {
        self.pods.get(name).is_some_and(|known| matches!(known.state, State::Ended(_)))
    }

    /// Whether people may want to look at a pod that ended so: it failed, and not because nobody had use for it.
    pub fn is_worth_a_look(&self, name: &str, end: &End) -> bool {
        let failed = end.cause == Cause::Memory || (end.cause == Cause::Own && end.code != Some(0));
        failed && self.pods.get(name).is_some_and(|known| !known.stray)
    }

    fn tell(&mut self, name: &str, mut end: End) -> Option<News> {
        let known = self.pods.get_mut(name)?;
        if std::mem::replace(&mut known.told, true) {
            return None;
        }
        let who = known.who;
        if end.cause == Cause::Memory {
            let deaths = self.memory_deaths.entry(memory_key(who.role, who.id)).or_default();
            *deaths += 1;
            end.memory_deaths = *deaths;
        }
        Some(News::Ended(who, end))
    }

    /// What an earlier master had learnt of memory is written on the pods.
    fn remember_memory(&mut self, pod: &Pod, who: Who) {
        let written = pod.annotations().get(names::MEMORY_DEATHS).and_then(|n| n.parse::<u32>().ok());
        let known = self.memory_deaths.entry(memory_key(who.role, who.id)).or_default();
        *known = written.unwrap_or(0).max(*known);
    }
}

/// Workers are alike; each server has partitions of its own.
fn memory_key(role: Role, id: u32) -> (i32, u32) {
    (role as i32, if role == Role::Worker { 0 } else { id })
}

/// Which process a pod is.
pub fn who(pod: &Pod) -> Option<Who> {
    let label = |name: &str| pod.labels().get(name).map(String::as_str);
    let launch = label(names::LAUNCH)?.parse().ok()?;
    // A member of a person's own program, whatever its role there, is a worker to us.
    if let Some(rank) = label(names::MEMBER) {
        return Some(Who { role: Role::Worker, id: rank.parse().ok()?, launch });
    }
    let role = match label(names::ROLE)? {
        "worker" => Role::Worker,
        "server" => Role::Server,
        _ => return None,
    };
    Some(Who { role, id: label(names::ID)?.parse().ok()?, launch })
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn pod(name: &str, launch: u32, status: Value) -> Pod {
        let (role, id) = name.strip_prefix("j-").unwrap().split_once('-').unwrap();
        let labels = json!({ names::ROLE: role, names::ID: id, names::LAUNCH: launch.to_string() });
        let object = json!({ "metadata": { "name": name, "labels": labels }, "status": status });
        serde_json::from_value(object).unwrap()
    }

    fn ended(reason: &str, code: i32) -> Value {
        let state = json!({ "terminated": { "exitCode": code, "reason": reason } });
        let container = json!({ "name": "elasticdl", "image": "", "imageID": "", "ready": false, "restartCount": 0, "state": state });
        json!({ "phase": "Failed", "containerStatuses": [container] })
    }

    fn runs() -> Value {
        json!({ "phase": "Running" })
    }

    const WORKER: Who = Who { role: Role::Worker, id: 3, launch: 7 };

    #[test]
    fn an_end_is_told_once_however_often_it_is_heard_of() {
        let mut roster = Roster::default();
        assert_eq!(roster.applied(&pod("j-worker-3", 7, runs())), None);
        assert!(roster.is_alive(WORKER) && !roster.is_alive(Who { launch: 8, ..WORKER }));
        let over = pod("j-worker-3", 7, ended("Error", 1));
        assert!(matches!(roster.applied(&over), Some(News::Ended(WORKER, End { code: Some(1), .. }))));
        assert!(!roster.is_alive(WORKER));
        assert_eq!(roster.applied(&over), None);
        assert_eq!(roster.deleted(&over), None);
        assert!(!roster.has("j-worker-3"));
    }

    /// Goal: a master that is cut off tries to make a pod for as long as it lives, and succeeds when its node is back;
    /// the pod is refused by the master that leads, and must not stay for ever as one that failed.
    #[test]
    fn what_an_earlier_master_has_made_late_is_not_kept() {
        let mut roster = Roster::default();
        roster.relist_begins();
        roster.applied(&pod("j-worker-1", 1, runs()));
        roster.relist_ends();
        roster.starts(WORKER);
        roster.applied(&pod("j-worker-3", WORKER.launch, runs()));
        roster.applied(&pod("j-worker-2", 2, runs()));
        // The watch was away in between: all are told again.
        roster.relist_begins();
        let mut worth_a_look = |name: &str, launch: u32| {
            let Some(News::Ended(_, end)) = roster.applied(&pod(name, launch, ended("Error", 1))) else {
                panic!("{name} has ended")
            };
            roster.is_worth_a_look(name, &end)
        };
        assert!(worth_a_look("j-worker-1", 1), "it was there when this master began");
        assert!(worth_a_look("j-worker-3", WORKER.launch), "this master has made it");
        assert!(!worth_a_look("j-worker-2", 2));
        roster.relist_ends();
        let well = End { code: Some(0), ..End::by(Cause::Own) };
        assert!(!roster.is_worth_a_look("j-worker-1", &well));
    }

    #[test]
    fn a_pod_that_vanished_while_the_watch_was_away_has_ended() {
        let mut roster = Roster::default();
        roster.applied(&pod("j-worker-3", 7, runs()));
        roster.applied(&pod("j-server-0", 2, runs()));
        roster.relist_begins();
        roster.applied(&pod("j-server-0", 2, runs()));
        let news = roster.relist_ends();
        assert_eq!(news, [News::Ended(WORKER, End::by(Cause::Deleted))]);
        assert!(roster.has("j-server-0") && !roster.has("j-worker-3"));
    }

    #[test]
    fn a_pod_stuck_in_leaving_is_given_up_when_its_time_is_over() {
        let mut roster = Roster::default();
        let mut leaving = pod("j-worker-3", 7, runs());
        leaving.metadata.deletion_timestamp = serde_json::from_value(json!("1970-01-01T00:01:40Z")).unwrap();
        assert_eq!(roster.applied(&leaving), None);
        assert_eq!(roster.overdue(100), []);
        assert_eq!(roster.overdue(101), [News::Ended(WORKER, End::by(Cause::NodeLost))]);
        assert_eq!(roster.overdue(200), []);
        assert!(roster.has("j-worker-3"), "its name is still taken");
        assert_eq!(roster.deleted(&leaving), None, "that was told");
    }

    #[test]
    fn deaths_for_lack_of_memory_are_counted_and_remembered_over_masters() {
        let mut roster = Roster::default();
        roster.applied(&pod("j-worker-3", 7, ended("OOMKilled", 137)));
        assert_eq!((roster.memory_deaths(Role::Worker, 9), roster.memory_deaths(Role::Server, 0)), (1, 0));
        let mut later = pod("j-worker-4", 8, runs());
        later.annotations_mut().insert(names::MEMORY_DEATHS.into(), "3".into());
        let mut next = Roster::default();
        next.applied(&later);
        assert_eq!(next.memory_deaths(Role::Worker, 5), 3);
        let news = next.applied(&pod("j-worker-5", 9, ended("OOMKilled", 137)));
        let Some(News::Ended(_, end)) = news else { panic!("{news:?}") };
        assert_eq!((end.cause, end.memory_deaths), (Cause::Memory, 4));
    }

    #[test]
    fn why_a_pod_waits_is_told_when_it_changes() {
        let mut roster = Roster::default();
        let waits = |why: &str| {
            let condition = json!({ "type": "PodScheduled", "status": "False", "message": why });
            pod("j-worker-3", 7, json!({ "phase": "Pending", "conditions": [condition] }))
        };
        assert!(matches!(roster.applied(&waits("no room")), Some(News::Waits(WORKER, _))));
        assert_eq!(roster.applied(&waits("no room")), None);
        assert!(roster.applied(&waits("still no room")).is_some());
        assert_eq!(
            roster.applied(&pod("j-worker-3", 7, json!({ "phase": "Pending" }))),
            Some(News::Placed(WORKER))
        );
        assert_eq!(roster.applied(&pod("j-worker-3", 7, runs())), None);
    }

    #[test]
    fn what_was_made_a_moment_ago_does_not_undo_what_the_watch_has_told() {
        let mut roster = Roster::default();
        let fresh = pod("j-worker-3", 7, json!({ "phase": "Pending" }));
        let condition = json!({ "type": "PodScheduled", "status": "False", "message": "no room" });
        let waits = pod("j-worker-3", 7, json!({ "phase": "Pending", "conditions": [condition] }));
        assert!(matches!(roster.applied(&waits), Some(News::Waits(WORKER, _))));
        assert_eq!(roster.created(&fresh), None, "it has no room all the same");
        assert_eq!(roster.applied(&waits), None);
        assert!(matches!(Roster::default().created(&waits), Some(News::Waits(WORKER, _))));
    }

    #[test]
    fn members_of_a_program_are_known_by_their_rank() {
        let mut member = pod("j-ps-0", 7, runs());
        member.labels_mut().insert(names::MEMBER.into(), "3".into());
        assert_eq!(who(&member), Some(WORKER));
        let mut roster = Roster::default();
        roster.applied(&member);
        assert!(roster.knows(WORKER) && !roster.knows(Who { id: 4, ..WORKER }));
    }

    #[test]
    fn pods_of_others_are_none_of_our_business() {
        let mut roster = Roster::default();
        let master: Pod = serde_json::from_value(
            json!({ "metadata": { "name": "j-master", "labels": { names::ROLE: "master" } } }),
        )
        .unwrap();
        assert_eq!(roster.applied(&master), None);
        assert!(!roster.has("j-master"));
    }
}
