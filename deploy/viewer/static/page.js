// What the server sent with a page of a run, and the address of that run.
export let data = JSON.parse(document.querySelector("#data").textContent);
export const run = `${document.documentElement.dataset.root}/run/${encodeURIComponent(data.run)}`;

/** Loads the page's data anew, from its JSON below the run; false where the server does not give it. */
export async function renew(path) {
  const answer = await fetch(`${run}/${path}`);
  if (answer.ok) data = await answer.json();
  return answer.ok;
}
