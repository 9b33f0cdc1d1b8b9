//! `evaluate`: how good an exported model is on some data.

use elasticdl_spec::scores::Scores;
use serde_json::json;

use crate::args::Evaluate;
use crate::fault::{Exit, Fault};
use crate::infer::{Bad, Job};
use crate::{print, truth};

/// `evaluate`.
pub fn evaluate(args: &Evaluate) -> anyhow::Result<Exit> {
    let job = Job::open(&args.input, if args.input.skip_bad { Bad::Skip } else { Bad::Fail })?;
    let mut scores = Scores::default();
    let mut bad = 0;
    job.run(&mut |scored| {
        bad += scored.bad;
        for (probability, label) in scored.probabilities.iter().zip(&scored.labels) {
            scores.add(*probability, *label);
        }
        Ok(())
    })?;
    let Some(logloss) = scores.logloss() else {
        return Err(Fault::user("there is no record to judge the model on").hint("look at --data").into());
    };
    let best = truth::best(&args.input.data);
    if args.json {
        let mut result = json!({
            "logloss": logloss, "auc": scores.auc(), "calibration": scores.calibration(),
            "records": scores.records(), "bad_records": bad,
        });
        if let Some(best) = best {
            result["best_logloss"] = json!(best.logloss);
            result["best_auc"] = json!(best.auc);
        }
        print::line(&result.to_string())?;
        return Ok(Exit::Done);
    }
    let mut lines = vec![format!("logloss      {logloss:.5}")];
    lines.extend(best.map(|best| format!("  at best    {:.5}", best.logloss)));
    // Without both kinds of labels there is nothing to rank.
    lines.push(
        scores.auc().map_or("AUC          none: all labels are the same".into(), |auc| {
            format!("AUC          {auc:.5}")
        }),
    );
    lines.extend(best.map(|best| format!("  at best    {:.5}", best.auc)));
    lines.extend(scores.calibration().map(|ratio| format!("calibration  {ratio:.4}")));
    lines.push(format!("records      {}", print::count(scores.records())));
    if bad > 0 {
        lines.push(format!("bad records  {}", print::count(bad)));
    }
    print::line(&lines.join("\n"))?;
    Ok(Exit::Done)
}
