//! The name that was probably meant.

/// The candidate most similar to `name`, if one is similar enough to be a slip of the hand.
pub(crate) fn nearest<'a>(name: &str, candidates: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    ranked(name, candidates).into_iter().next()
}

/// The candidates similar to `name`, the most similar first.
pub(crate) fn ranked<'a>(name: &str, candidates: impl IntoIterator<Item = &'a str>) -> Vec<&'a str> {
    const SIMILAR: f64 = 0.75;
    let lower = name.to_lowercase();
    let mut scored: Vec<(f64, &str)> = candidates
        .into_iter()
        .map(|candidate| (strsim::jaro_winkler(&lower, &candidate.to_lowercase()), candidate))
        .filter(|(score, _)| *score >= SIMILAR)
        .collect();
    scored.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(b.1)));
    scored.into_iter().map(|(_, candidate)| candidate).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slips_of_the_hand_are_found_and_strangers_are_not() {
        assert_eq!(nearest("incom", ["age", "income", "race"]), Some("income"));
        assert_eq!(nearest("LABEL", ["label", "I1"]), Some("label"));
        assert_eq!(nearest("zebra", ["age", "income"]), None);
        assert_eq!(ranked("trian.tsv", ["test.tsv", "train.tsv", "notes.md"])[0], "train.tsv");
    }
}
