//! Reading what a program tells for Prometheus, as far as reports need it. Pure.

use std::collections::BTreeMap;

/// Samples, by name and labels.
#[derive(Debug, Default)]
pub struct Samples(Vec<(String, String, f64)>);

impl Samples {
    /// From a page, with or without the head of an HTTP answer.
    pub fn read(text: &str) -> Samples {
        let sample = |line: &str| {
            let (what, value) = line.rsplit_once(' ')?;
            let (name, labels) = what.split_once('{').unwrap_or((what, "}"));
            let labels = labels.strip_suffix('}')?;
            Some((name.to_owned(), labels.to_owned(), value.parse().ok()?))
        };
        Samples(text.lines().filter(|line| !line.starts_with('#')).filter_map(sample).collect())
    }

    /// The value of one with exactly these labels.
    pub fn value(&self, name: &str, labels: &str) -> Option<f64> {
        self.0.iter().find(|(n, l, _)| n == name && l == labels).map(|(_, _, value)| *value)
    }

    /// Sums by the value of one label.
    pub fn sums(&self, name: &str, label: &str) -> BTreeMap<String, f64> {
        let mut sums = BTreeMap::new();
        for (_, labels, value) in self.0.iter().filter(|(n, ..)| n == name) {
            *sums.entry(label_of(labels, label).unwrap_or_default().to_owned()).or_default() += value;
        }
        sums
    }

    /// A quantile of a histogram, with these labels beside `le`: between the bounds of its bucket as if all in it
    /// were evenly spread. `None` where it lies beyond the last bound.
    pub fn quantile(&self, (name, labels): (&str, &str), quantile: f64) -> Option<f64> {
        let bucket = format!("{name}_bucket");
        let ours = |l: &str| {
            l.strip_prefix(labels)?
                .trim_start_matches(',')
                .strip_prefix("le=\"")?
                .strip_suffix('"')
                .map(str::to_owned)
        };
        let buckets = self.0.iter().filter(|(n, ..)| *n == bucket);
        let buckets: Vec<(f64, f64)> = buckets
            .filter_map(|(_, l, count)| Some((ours(l)?.replace("+Inf", "inf").parse().ok()?, *count)))
            .collect();
        let wanted = buckets.last()?.1 * quantile;
        let (mut below, mut least) = (0.0, 0.0);
        for (bound, count) in buckets {
            if count >= wanted && count > 0.0 {
                let share = if count > below { (wanted - below) / (count - below) } else { 1.0 };
                return bound.is_finite().then_some(least + (bound - least) * share);
            }
            (below, least) = (count, bound);
        }
        None
    }
}

fn label_of<'a>(labels: &'a str, label: &str) -> Option<&'a str> {
    labels.split(',').find_map(|pair| pair.strip_prefix(label)?.strip_prefix("=\"")?.strip_suffix('"'))
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: &str = "HTTP/1.1 200 OK\r\n\r\n# TYPE t histogram\n\
        t_bucket{w=\"a\",le=\"0.1\"} 50\nt_bucket{w=\"a\",le=\"0.5\"} 98\nt_bucket{w=\"a\",le=\"1\"} 99\nt_bucket{w=\"a\",le=\"+Inf\"} 100\n\
        t_bucket{w=\"b\",le=\"0.1\"} 0\nt_bucket{w=\"b\",le=\"+Inf\"} 0\n\
        r{verb=\"get\",resource=\"a\"} 3\nr{verb=\"get\",resource=\"b\"} 4\nr{verb=\"list\",resource=\"b\"} 5\nf 7\n";

    #[test]
    fn samples_are_found_and_summed() {
        let samples = Samples::read(PAGE);
        assert_eq!(samples.value("f", ""), Some(7.0));
        assert_eq!(samples.value("f", "x"), None);
        assert_eq!(samples.sums("r", "verb"), BTreeMap::from([("get".into(), 7.0), ("list".into(), 5.0)]));
    }

    #[test]
    fn quantiles_lie_between_the_bounds_of_their_bucket() {
        let samples = Samples::read(PAGE);
        let quantile = |q: f64| samples.quantile(("t", "w=\"a\""), q);
        assert_eq!(quantile(0.5), Some(0.1));
        assert!((quantile(0.74).unwrap() - 0.3).abs() < 1e-9);
        assert_eq!(quantile(0.99), Some(1.0));
        assert_eq!(quantile(1.0), None, "beyond the last bound");
        assert_eq!(samples.quantile(("t", "w=\"b\""), 0.5), None, "there is none");
    }
}
