//! How stale gradients are, as text. Servers count by classes (`ps/src/staleness.rs`): 0, 1, 2 to 3, 4 to 7 and so on.

use elasticdl_master::status::Process;
use serde_json::Value;

/// How many pushes a server has applied, by class.
fn classes(gauges: &Value) -> Vec<u64> {
    gauges["staleness"].as_array().into_iter().flatten().filter_map(Value::as_u64).collect()
}

/// The median and the most of one server.
pub fn middle_and_most(gauges: &Value) -> Option<String> {
    let classes = classes(gauges);
    let (median, most) = (class_at(&classes, 0.5)?, class_at(&classes, 1.0)?);
    Some(format!("staleness {median}, at most {most}"))
}

/// The histogram of all servers; `None` where nothing was stale.
pub fn histogram(servers: &[Process]) -> Option<String> {
    let mut sums: Vec<u64> = Vec::new();
    for server in servers {
        let classes = classes(&server.gauges);
        sums.resize(sums.len().max(classes.len()), 0);
        sums.iter_mut().zip(classes).for_each(|(sum, count)| *sum += count);
    }
    let all: u64 = sums.iter().sum();
    sums.get(1..)?.iter().any(|count| *count > 0).then(|| {
        let some = sums.iter().enumerate().filter(|(_, count)| **count > 0);
        let parts = some.map(|(class, count)| format!("{}: {}", name(class), percent(*count, all)));
        format!("staleness in batches  {}", parts.collect::<Vec<_>>().join("  "))
    })
}

/// A part of all, never shown as nothing.
fn percent(count: u64, all: u64) -> String {
    match 100.0 * count as f64 / all as f64 {
        share if share >= 9.95 => format!("{share:.0} %"),
        share if share >= 0.05 => format!("{share:.1} %"),
        _ => "<0.1 %".into(),
    }
}

/// The class below or at which such a share of pushes is.
fn class_at(classes: &[u64], share: f64) -> Option<String> {
    let due = (classes.iter().sum::<u64>() as f64 * share).ceil().max(1.0) as u64;
    let mut seen = 0;
    let class = classes.iter().position(|count| {
        seen += count;
        seen >= due
    })?;
    Some(name(class))
}

fn name(class: usize) -> String {
    match class {
        0 | 1 => class.to_string(),
        _ => format!("{}-{}", 1u64 << (class - 1), (1u64 << class) - 1),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::view::block::tests::member;

    fn server(classes: &[u64]) -> Process {
        Process { gauges: serde_json::json!({ "staleness": classes }), ..member(0, "serving", 0) }
    }

    #[test]
    fn a_histogram_is_of_all_servers_and_leaves_out_what_is_empty() {
        let text = histogram(&[server(&[8_000, 1_500]), server(&[100, 0, 395, 0, 5])]).unwrap();
        assert_eq!(text, "staleness in batches  0: 81 %  1: 15 %  2-3: 4.0 %  8-15: 0.1 %");
        let text = histogram(&[server(&[1_000_000, 1, 90_000])]).unwrap();
        assert_eq!(text, "staleness in batches  0: 92 %  1: <0.1 %  2-3: 8.3 %");
    }

    #[test]
    fn there_is_no_histogram_where_nothing_was_stale() {
        assert_eq!(histogram(&[]), None);
        assert_eq!(histogram(&[server(&[]), server(&[17])]), None);
        assert_eq!(histogram(&[server(&[17, 0])]), None);
        assert_eq!(histogram(&[server(&[0, 1])]).unwrap(), "staleness in batches  1: 100 %");
    }

    #[test]
    fn a_median_is_a_class() {
        assert_eq!(class_at(&[], 0.5), None);
        assert_eq!(class_at(&[5], 1.0).unwrap(), "0");
        assert_eq!(class_at(&[0, 1], 0.5).unwrap(), "1");
        assert_eq!(
            middle_and_most(&server(&[10, 20, 60, 9, 1]).gauges).unwrap(),
            "staleness 2-3, at most 8-15"
        );
    }
}
